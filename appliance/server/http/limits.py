"""Limits of each API key: requests and tokens per minute, and open requests.

A key can use a minute's worth at once; it refills evenly. Tokens count as they are read and
written: an overdrawn key waits before its next request, and running ones continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.config.api_keys import KeyLimits
from appliance.server.http.errors import RateLimitError
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.config.api_keys import ApiKey

MINUTE = 60.0  # seconds
_PARALLEL_RETRY_AFTER = 2.0  # seconds; the end of a request is unknown

NO_LIMITS = KeyLimits()


@dataclass(slots=True)
class _Holder:
    limits: KeyLimits = NO_LIMITS
    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_open: int = 0


class KeyUse:
    """Counts each key's use against its limits.

    Args:
        known: returns the current keys by name.
    """

    def __init__(
        self,
        known: Callable[[], Mapping[str, ApiKey]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = known
        self._clock = clock
        self._holders: dict[str, _Holder] = {}

    def limits_of(self, name: str) -> KeyLimits:
        """Return a key's limits; none without keys or for a removed key."""
        key = self._known().get(name)
        return NO_LIMITS if key is None else key.limits

    def begin(self, name: str, num_tokens: int) -> Use:
        """Begin a key's request.

        Args:
            num_tokens: of its prompts.

        Raises:
            RateLimitError: the limits leave no room now.
        """
        holder = self._holder(name)
        limits = holder.limits
        if limits.parallel is not None and holder.num_open >= limits.parallel:
            raise RateLimitError(
                f"this API key may have {counted(limits.parallel, 'request')} open at once",
                _PARALLEL_RETRY_AFTER,
            )
        if holder.requests and (seconds := holder.requests.seconds_until(1)):
            allowed = counted(limits.requests or 0, "request")
            raise RateLimitError(f"this API key may make {allowed} a minute", seconds)
        # A prompt of more than a minute's tokens starts on a full bucket.
        wanted = min(num_tokens, limits.tokens or 0)
        if holder.tokens and (seconds := holder.tokens.seconds_until(wanted)):
            allowed = counted(limits.tokens or 0, "token")
            raise RateLimitError(f"this API key may use {allowed} a minute", seconds)
        if holder.requests is not None:
            holder.requests.take(1)
        if holder.tokens is not None:
            holder.tokens.take(num_tokens)
        return Use(holder)

    def _holder(self, name: str) -> _Holder:
        """Return a key's holder; with full buckets if its limits changed."""
        limits = self.limits_of(name)
        holder = self._holders.setdefault(name, _Holder())
        if holder.limits != limits:
            holder.limits = limits
            holder.requests = self._bucket(limits.requests)
            holder.tokens = self._bucket(limits.tokens)
        return holder

    def _bucket(self, a_minute: int | None) -> Bucket | None:
        return None if a_minute is None else Bucket(a_minute, MINUTE, self._clock)


class Use:
    """An open request; always `end` it."""

    def __init__(self, holder: _Holder) -> None:
        self._holder = holder
        self._ended = False
        holder.num_open += 1

    def take(self, num_tokens: int) -> None:
        if self._holder.tokens is not None:
            self._holder.tokens.take(num_tokens)

    def end(self) -> None:
        """End the request; repeated calls do nothing."""
        if not self._ended:
            self._ended = True
            self._holder.num_open -= 1


class Bucket:
    """A budget that refills evenly (token bucket).

    Starts full. Taking more than it holds overdraws it; it repays the debt first.

    Args:
        size: capacity.
        seconds: time to fill an empty one.
        clock: returns monotonic seconds.
    """

    def __init__(self, size: float, seconds: float, clock: Callable[[], float]) -> None:
        self._size = size
        self._rate = size / seconds
        self._clock = clock
        self._left = size
        self._when = clock()

    def seconds_until(self, wanted: float) -> float:
        """Return the seconds until it holds an amount; 0 if it does now."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._when) * self._rate)
        self._when = now
        return max(0.0, (wanted - self._left) / self._rate)

    def take(self, amount: float) -> None:
        self._left -= amount
