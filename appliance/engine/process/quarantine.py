"""Requests that an engine died of: who was there twice is not let in again for a while.

A client repeats what failed, and a request that ends engines would so take the server away from all
others. One that was there when an engine died is a suspect; the second time it is refused, and one
that comes to its end is none any more. Requests are known by all that the engine is told of them.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import QuarantinedError

if TYPE_CHECKING:
    from appliance.engine.request import Request

STRIKES = 2
SECONDS = 600.0  # after the latest
_MAX_KEPT = 1024


class Quarantine:
    """What was there when engines died.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._strikes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        """Requests that are refused now."""
        self._forget_old()
        return sum(count >= STRIKES for count, _ in self._strikes.values())

    def strike(self, requests: Iterable[Request]) -> None:
        """An engine died while it worked on these; several that are equal count once."""
        self._forget_old()
        for mark in dict.fromkeys(map(_fingerprint, requests)):
            count, _ = self._strikes.pop(mark, (0, 0.0))
            self._strikes[mark] = (count + 1, self._clock())
            if len(self._strikes) > _MAX_KEPT:
                self._strikes.popitem(last=False)

    def absolve(self, request: Request) -> None:
        """A request came to its end."""
        if self._strikes:
            self._strikes.pop(_fingerprint(request), None)

    def is_suspect(self, request: Request) -> bool:
        """Whether an engine died while it worked on such a request.

        Raises:
            QuarantinedError: more than one did.
        """
        self._forget_old()
        if not self._strikes:
            return False  # nearly always: nothing is hashed
        count, when = self._strikes.get(_fingerprint(request), (0, 0.0))
        if count >= STRIKES:
            raise QuarantinedError(when + SECONDS - self._clock())
        return count > 0

    def _forget_old(self) -> None:
        oldest = self._clock() - SECONDS
        while self._strikes and next(iter(self._strikes.values()))[1] <= oldest:
            self._strikes.popitem(last=False)


def _fingerprint(request: Request) -> bytes:
    """Of prompt, sampling and owner: what one has done is not laid at another's door."""
    told = (request.owner, request.prompt_token_ids, request.sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16).digest()
