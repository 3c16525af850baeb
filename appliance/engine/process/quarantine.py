"""Quarantines requests that engines died of: refuses them for a while after the second death.

Clients retry, so one request that kills engines could deny the server to everyone. A request that
ran when an engine died is a suspect; the second time it is refused, and one that completes is
cleared. Suspects run one at a time, so that none fails others. Requests are equal if prompt,
sampling and owner are.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from appliance.errors import QuarantinedError

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.engine.process.generation import Generation


AskedT = TypeVar("AskedT")
STRIKES = 2
SECONDS = 600.0  # after the last death
_MAX_KEPT = 1024


class Quarantine(Generic[AskedT]):
    """Counts the deaths at which each request was running.

    Args:
        mark: hashes everything that identifies a request.
    """

    def __init__(
        self, mark: Callable[[AskedT], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mark = mark
        self._clock = clock
        self.strikes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        """Number of requests refused now."""
        self._forget_old()
        return sum(count >= STRIKES for count, _ in self.strikes.values())

    def strike(self, requests: Iterable[AskedT]) -> None:
        """Count an engine's death against these requests; equal ones count once."""
        self._forget_old()
        for mark in dict.fromkeys(map(self._mark, requests)):
            count, _ = self.strikes.pop(mark, (0, 0.0))
            self.strikes[mark] = (count + 1, self._clock())
            if len(self.strikes) > _MAX_KEPT:
                self.strikes.popitem(last=False)

    def absolve(self, request: AskedT) -> None:
        if self.strikes:
            self.strikes.pop(self._mark(request), None)

    def is_suspect(self, request: AskedT) -> bool:
        """Return True if an engine died while it ran an equal request.

        Raises:
            QuarantinedError: several died.
        """
        self._forget_old()
        if not self.strikes:
            return False  # the usual case: no hashing
        count, when = self.strikes.get(self._mark(request), (0, 0.0))
        if count >= STRIKES:
            raise QuarantinedError(when + SECONDS - self._clock())
        return count > 0

    def _forget_old(self) -> None:
        oldest = self._clock() - SECONDS
        while self.strikes and next(iter(self.strikes.values()))[1] <= oldest:
            self.strikes.popitem(last=False)


def mark_of(request: Request) -> bytes:
    """Hash prompt, sampling and owner: one user's strikes do not count against another."""
    told = (request.owner, request.prompt_token_ids, request.sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16).digest()


class Trials:
    """The running suspect, and those that wait for its first tokens or its end.

    `Quarantine` decides which requests are suspects.
    """

    def __init__(self) -> None:
        self.running: Generation | None = None
        self._held: deque[Generation] = deque()

    def __contains__(self, generation: Generation) -> bool:
        """Return True if a suspect is waiting for another one's trial."""
        return generation in self._held

    def admits(self, generation: Generation) -> bool:
        """Begin a suspect's trial, or hold it; return True if the request may run."""
        if not generation.is_suspect:
            return True
        if self.running is not None:
            self._held.append(generation)
            return False
        self.running = generation
        return True

    def end(
        self, generation: Generation, is_open: Callable[[Generation], bool]
    ) -> Generation | None:
        """End a request's trial, if any; return the next open suspect."""
        if self.running is not generation:
            return None
        self.running = None
        while self._held:
            following = self._held.popleft()
            if is_open(following):
                return following
        return None

    def abandon(self) -> tuple[Generation, ...]:
        """End all trials with the process; return the held suspects."""
        held = tuple(self._held)
        self.running = None
        self._held.clear()
        return held
