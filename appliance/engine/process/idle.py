"""Measures the time without a request; runs nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls back after some seconds from `start`.

    Args:
        seconds: 0 never calls back.
    """

    def __init__(self, seconds: float, on_idle: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_idle = on_idle
        self._due: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        if self._seconds:
            self._due = asyncio.get_running_loop().call_later(self._seconds, self._on_idle)

    def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
