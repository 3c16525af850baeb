"""The service manager that started this process, as its environment tells."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceSocket:
    """Systemd's way to be told how a service is, see sd_notify(3).

    Attributes:
        address: of a Unix datagram socket; a first `@` stands for the zero byte of an abstract one.
        watchdog_seconds: after which it expects a sign of life; None if it expects none.
    """

    address: str
    watchdog_seconds: float | None = None


def service_socket() -> ServiceSocket | None:
    """Return the socket for this process; None if no service manager wants to be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    micro, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    is_ours = process in ("", str(os.getpid()))
    return ServiceSocket(address, int(micro) / 1e6 if micro.isdecimal() and is_ours else None)
