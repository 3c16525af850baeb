"""Folders and service manager that the environment names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.config.setting import ENV_PREFIX
from appliance.errors import ConfigError

CACHE_VARIABLE = ENV_PREFIX + "CACHE_DIR"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
MODELS_VARIABLE = ENV_PREFIX + "MODELS_DIR"  # where tests find models
# Variables that set no field of a section.
OTHER_VARIABLES = {CACHE_VARIABLE, CONFIG_VARIABLE, MODELS_VARIABLE}


def cache_dir() -> Path:
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "appliance"


def kv_dir() -> Path:
    return cache_dir() / "kv"


def packed_dir() -> Path:
    """Return the folder of packed weights, see `engine.packed_models`."""
    return cache_dir() / "packed"


def tuning_dir() -> Path:
    """Return the folder of what was timed on this machine's GPUs, see `engine.load.tuning`."""
    return cache_dir() / "tuning"


def jobs_dir() -> Path:
    """Return the folder where this user's jobs report progress, see `appliance.progress.jobs`."""
    return cache_dir() / "jobs"


def config_path(named: Path | None = None) -> Path | None:
    """Find the configuration file; None if there is none.

    Args:
        named: file that a flag names; None for APPLIANCE_CONFIG, else the usual place.

    Raises:
        ConfigError: the named file does not exist.
    """
    by = ""
    if named is None and (explicit := os.environ.get(CONFIG_VARIABLE)):
        named, by = Path(explicit).expanduser(), f", which {CONFIG_VARIABLE} names"
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"there is no configuration file at {named}{by}")
        return named
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    usual = Path(base) / "appliance" / "config.toml"
    return usual if usual.is_file() else None


def is_credential(path: Path) -> bool:
    """Return True for a file that systemd shows only to this service.

    Its access list for the service's account looks like group access in the file's mode.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder) and path.absolute().is_relative_to(folder or "")


@dataclass(frozen=True, slots=True)
class ServiceSocket:
    """Socket that reports a service's state to systemd, see sd_notify(3).

    Attributes:
        address: of a Unix datagram socket; a leading `@` stands for the zero byte of an abstract
            one.
        watchdog_seconds: longest time between two reports; None if none are expected.
    """

    address: str
    watchdog_seconds: float | None = None


def service_socket() -> ServiceSocket | None:
    """Return this process's socket; None if no service manager expects reports."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    micro, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    is_ours = process in ("", str(os.getpid()))
    return ServiceSocket(address, int(micro) / 1e6 if micro.isdecimal() and is_ours else None)
