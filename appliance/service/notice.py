"""Notifies systemd of the service's state: loading, ready, stopping, watchdog pings."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.config import ServiceSocket

# A start may take hours, such as a download, if something progresses within this time.
START_PATIENCE = 600.0  # seconds
_INTERVAL = 1.0  # seconds between two status updates
_PATIENCE = 5.0  # seconds for a slow manager; watchdog pings do not wait

logger = logging.getLogger(__name__)


class ServiceNotice:
    """Sends datagrams to the service manager; does nothing without one.

    Args:
        manager: socket of the manager that started this process, or None.
    """

    def __init__(
        self, manager: ServiceSocket | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._stage = ""
        self._next = 0.0

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show a stage of the start in the status and extend the start timeout."""
        now = self._clock()
        if self._manager is None or (stage == self._stage and now < self._next):
            return
        self._stage, self._next = stage, now + _INTERVAL
        share = f" {100 * done // total} %" if total else ""
        self.send(0.0, STATUS=f"{stage}{share}", EXTEND_TIMEOUT_USEC=f"{START_PATIENCE * 1e6:.0f}")

    def ready(self, words: str) -> None:
        """Report that the server accepts requests; `words` is the status."""
        self.send(_PATIENCE, READY="1", STATUS=words)

    def stopping(self) -> None:
        """Report that the server accepts no more requests."""
        self.send(_PATIENCE, STOPPING="1", STATUS="finishing requests in flight")

    async def watch(self, is_alive: Callable[[], bool]) -> None:
        """Send watchdog pings while `is_alive` returns True; return if there is no watchdog."""
        if self._manager is None or self._manager.watchdog_seconds is None:
            return
        while True:
            if is_alive():
                self.send(0.0, WATCHDOG="1")
            await asyncio.sleep(self._manager.watchdog_seconds / 4)

    def send(self, patience: float, **fields: str) -> None:
        """Send fields to the manager, waiting at most `patience` seconds; log a failure."""
        if self._manager is None:
            return
        address = self._manager.address
        if address.startswith("@"):
            address = "\0" + address[1:]
        lines = (f"{name}={' '.join(value.split())}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(patience)
                sock.connect(address)
                sock.send("\n".join(lines).encode())
        except OSError as error:
            logger.warning("the service manager cannot be told: %s", error.strerror or error)
