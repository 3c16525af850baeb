"""Runs suspects one at a time, so that a request that kills engines fails no other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.process.generation import Generation


class Trials:
    """The running suspect, and those that wait for its first tokens or its end.

    `Quarantine` decides which requests are suspects.
    """

    def __init__(self) -> None:
        self._running: Generation | None = None
        self._held: deque[Generation] = deque()

    def __contains__(self, generation: Generation) -> bool:
        """Return True if a suspect is waiting for another one's trial."""
        return generation in self._held

    def admits(self, generation: Generation) -> bool:
        """Begin a suspect's trial, or hold it; return True if the request may run."""
        if not generation.is_suspect:
            return True
        if self._running is not None:
            self._held.append(generation)
            return False
        self._running = generation
        return True

    def end(
        self, generation: Generation, is_open: Callable[[Generation], bool]
    ) -> Generation | None:
        """End a request's trial, if any; return the next open suspect."""
        if self._running is not generation:
            return None
        self._running = None
        while self._held:
            following = self._held.popleft()
            if is_open(following):
                return following
        return None

    def abandon(self) -> tuple[Generation, ...]:
        """End all trials with the process; return the held suspects."""
        held = tuple(self._held)
        self._running = None
        self._held.clear()
        return held
