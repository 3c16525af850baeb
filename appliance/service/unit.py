"""Writes the systemd unit that starts the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.service.notice import START_PATIENCE

# Longer than the supervisor takes to end a hung engine, for when it fails to.
_WATCHDOG_SECONDS = 120
_TIME_TO_END = 15.0  # seconds to write KV cache after the last answer
# Exit codes for a wrong setting, an unusable model and too little memory: a restart does not help.
_NO_RETRY = "2 3 4"

# After a reboot without a desktop nobody has loaded NVIDIA's modules or made its device files, and
# the hardened service may not. systemd reads the numbers behind DeviceAllow as it starts the unit,
# so another unit loads the modules before. The + leaves out the hardening, the - allows that a
# machine has no such program. As root nvidia-smi makes the files of all cards.
_MODULES = """\
Wants=modprobe@nvidia_uvm.service
After=modprobe@nvidia_uvm.service
"""
_DEVICE_FILES = """\
ExecStartPre=-+/usr/bin/timeout 20 /usr/bin/nvidia-smi -L
ExecStartPre=-+/usr/bin/nvidia-modprobe -c0 -u
"""

# Without MemoryDenyWriteExecute: PyTorch compiles some loops when they first run. The m of
# DeviceAllow lets the programs above make files; the service lacks the right to.
_HARDENED = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={home}
PrivateTmp=yes
PrivateUsers=yes
PrivateMounts=yes
DevicePolicy=closed
DeviceAllow=char-nvidia rwm
DeviceAllow=char-nvidia-frontend rwm
DeviceAllow=char-nvidia-uvm rwm
DeviceAllow=char-nvidiactl rwm
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077"""

# What a manager without privileges supports.
_HARDENED_FOR_USER = """\
NoNewPrivileges=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077"""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Options of a service.

    Attributes:
        command: starts `appliance`; absolute.
        arguments: of `appliance serve`.
        is_user: for the user's own service manager.
        run_as: an account; None for one that exists only while the service runs.
        drain_timeout: seconds for open answers to finish after the request to stop.
        config: the settings file; it may hold keys and be readable only by root.
    """

    command: Sequence[str]
    arguments: Sequence[str] = ()
    is_user: bool = False
    run_as: str | None = None
    drain_timeout: float = 30.0
    config: str = "/etc/appliance/config.toml"


def unit_text(plan: ServicePlan) -> str:
    start = " ".join(_quoted(word) for word in (*plan.command, "serve", *plan.arguments))
    network = "Wants=network-online.target\nAfter=network-online.target\n"
    order = "" if plan.is_user else f"{network}{_MODULES}"
    return f"""\
[Unit]
Description=Language models for this home (appliance)
{order}
[Service]
Type=notify
NotifyAccess=main
{_DEVICE_FILES}ExecStart={start}
TimeoutStartSec={START_PATIENCE:.0f}
TimeoutStopSec={plan.drain_timeout + _TIME_TO_END:.0f}
KillMode=mixed
WatchdogSec={_WATCHDOG_SECONDS}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={_NO_RETRY}
{_account(plan)}

[Install]
WantedBy={"default" if plan.is_user else "multi-user"}.target
"""


def _account(plan: ServicePlan) -> str:
    if plan.is_user:
        return _HARDENED_FOR_USER
    who = "DynamicUser=yes" if plan.run_as is None else f"User={plan.run_as}"
    return f"""\
{who}
CacheDirectory=appliance
CacheDirectoryMode=0700
LoadCredential=config.toml:{plan.config}
Environment=APPLIANCE_CONFIG=%d/config.toml
Environment=APPLIANCE_CACHE_DIR=%C/appliance
Environment=HF_HOME=%C/appliance/hub
Environment=HOME=%C/appliance
{_HARDENED.format(home="yes" if plan.run_as is None else "read-only")}"""


def _quoted(word: str) -> str:
    """Quote a word of a systemd command line, where % and $ are special."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not set(word) & set(" \t\"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
