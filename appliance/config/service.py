"""The service manager that started this process, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
