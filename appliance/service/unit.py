"""Writes the unit with which systemd starts the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.service.notice import START_PATIENCE

# Longer than the supervisor takes to end an engine that hangs: this is for when it does not.
_WATCHDOG_SECONDS = 120
_TIME_TO_END = 15.0  # seconds after the last answer, for KV cache to be written
# Exit codes of a wrong setting, an unusable model and too little memory: trying again is no help.
_NO_RETRY = "2 3 4"

# Not MemoryDenyWriteExecute: PyTorch compiles some of its loops when they first run.
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
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidiactl rw
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

# What an unprivileged manager can do.
_HARDENED_FOR_USER = """\
NoNewPrivileges=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077"""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service to be.

    Attributes:
        command: starts `appliance`; absolute.
        arguments: of `appliance serve`.
        is_user: for the user's own service manager.
        run_as: an account; None for one that exists only while the service runs.
        drain_timeout: seconds that answers may continue after the end was asked for.
        config: file with the settings, which may hold keys and which root alone may read.
    """

    command: Sequence[str]
    arguments: Sequence[str] = ()
    is_user: bool = False
    run_as: str | None = None
    drain_timeout: float = 30.0
    config: str = "/etc/appliance/config.toml"


def unit_text(plan: ServicePlan) -> str:
    """Write the unit file."""
    start = " ".join(_quoted(word) for word in (*plan.command, "serve", *plan.arguments))
    network = "" if plan.is_user else "Wants=network-online.target\nAfter=network-online.target\n"
    return f"""\
[Unit]
Description=Language models for this home (appliance)
{network}
[Service]
Type=notify
NotifyAccess=main
ExecStart={start}
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
    """Quote a word of a command line for systemd, where % and $ have a meaning."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not set(word) & set(" \t\"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
