"""Keeps several engines within one machine's memory: the longest idle one makes room.

An engine without memory sleeps. Before it sleeps it finishes its requests; requests that arrive
meanwhile wait and wake it in their turn. One without requests may sleep after a while, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from appliance.engine.process.answers import ReadyWaiters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.messages import MemoryPlanned


logger = logging.getLogger(__name__)


class Sleeper(Protocol):
    """An engine that can free its memory."""

    @property
    def is_wanted(self) -> bool:
        """True if it is loading or has open requests."""
        ...

    def sleep(self) -> None:
        """End the process, unless it has work or is loading."""
        ...


class Residency:
    """The memory of all engines; each asks before it takes any.

    Args:
        limit: bytes of all engines together; None uses what the first one finds free.
    """

    def __init__(self, limit: int | None = None, *, is_shared: bool = False) -> None:
        self.limit = limit
        self.is_shared = is_shared
        self.places: list[Resident] = []
        self._turn = asyncio.Lock()

    async def admit(self, place: Resident, planned: MemoryPlanned) -> None:
        """Wait until an engine may take its memory; in the order of requests, one at a time.

        If no other model can make room, lets it start; its own plan reports what is missing.
        """
        async with self._turn:
            others = [one for one in self.places if one is not place]
            if self.limit is None and self.is_shared and not _held(others):
                self.limit = planned.free_bytes
            limit = planned.needed_bytes if self.limit is None else self.limit
            freed = 0
            while holders := [one for one in others if one.memory_bytes]:
                over = _held(holders) + planned.needed_bytes - limit
                if max(over, planned.needed_bytes - planned.free_bytes - freed) <= 0:
                    break
                first = min(holders, key=lambda one: (one.is_wanted, one.last_used))
                freed += first.memory_bytes
                logger.info("%s makes room for %s", first.name, place.name)
                await first.make_room()
            place.memory_bytes = planned.needed_bytes


class Resident:
    """One engine's part in the memory.

    Args:
        copies: number of replicas that divide the limit.

    Attributes:
        last_used: monotonic time at which a request last began or ended.
        is_leaving: it ends after its open requests and gets no new ones.
    """

    def __init__(self, residency: Residency, name: str, engine: Sleeper, copies: int = 1) -> None:
        self.name = name
        self.memory_bytes = 0
        self.last_used = 0.0
        self.is_leaving = False
        self.residency = residency
        self._engine = engine
        self._copies = copies
        self._left = ReadyWaiters()
        residency.places.append(self)

    @property
    def terms(self) -> tuple[int | None, bool]:
        """Its share of the limit, and True if there are several engines."""
        limit = self.residency.limit
        return None if limit is None else limit // self._copies, self.residency.is_shared

    @property
    def is_wanted(self) -> bool:
        return self._engine.is_wanted

    def use(self) -> None:
        """Record that a request begins or ends."""
        self.last_used = time.monotonic()

    async def take(self, planned: MemoryPlanned) -> None:
        await self.residency.admit(self, planned)

    async def make_room(self) -> None:
        """Put the engine to sleep after its open requests, and wait for that."""
        self.ask_to_leave()
        while self.memory_bytes:
            await self._left.wait()

    def ask_to_leave(self) -> None:
        """Put the engine to sleep after its open requests."""
        self.is_leaving = True
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Put the engine to sleep if it has to leave and its requests have ended."""
        if self.is_leaving:
            self._engine.sleep()

    def leave(self) -> None:
        """Record that the engine's process has ended, or will not start."""
        self.memory_bytes, self.is_leaving = 0, False
        self._left.wake()


def _held(places: Iterable[Resident]) -> int:
    return sum(one.memory_bytes for one in places)


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
