"""Runs suspects one at a time, so that a request that kills engines takes no other with it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.process.generation import Generation


class Trials:
    """The suspect that the engine runs, and those that wait for its first tokens or its end.

    `Quarantine` says who is a suspect.
    """

    def __init__(self) -> None:
        self._running: Generation | None = None
        self._held: deque[Generation] = deque()

    def __contains__(self, generation: Generation) -> bool:
        """Return True if a suspect waits for another one's trial."""
        return generation in self._held

    def admits(self, generation: Generation) -> bool:
        """Begin a suspect's trial, or hold it while there is another; all others may go on."""
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
        """End a request's trial, if it is on trial; return the open suspect that is next."""
        if self._running is not generation:
            return None
        self._running = None
        while self._held:
            following = self._held.popleft()
            if is_open(following):
                return following
        return None

    def abandon(self) -> tuple[Generation, ...]:
        """End all trials with the process; return the suspects that it was not given."""
        held = tuple(self._held)
        self._running = None
        self._held.clear()
        return held
