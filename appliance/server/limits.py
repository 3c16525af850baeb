"""What each API key may have: requests and tokens a minute, and requests that are open at once.

A minute's worth can be used at once and comes back evenly. Tokens are counted as they are read and
written, so a key that has overdrawn waits before it may ask again; what runs is never cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.api_keys import KeyLimits
from appliance.server.errors import RateLimitError
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.api_keys import ApiKey

MINUTE = 60.0  # seconds
_PARALLEL_RETRY_AFTER = 2.0  # seconds; when a request ends is not known


@dataclass(slots=True)
class _Bucket:
    """So many a minute; below zero it has been overdrawn."""

    left: float
    when: float  # monotonic seconds of that

    def seconds_until(self, wanted: float, per_minute: int, now: float) -> float:
        """Until it holds that many again; 0 if it does."""
        rate = per_minute / MINUTE
        self.left = min(per_minute, self.left + (now - self.when) * rate)
        self.when = now
        return max(0.0, (wanted - self.left) / rate)


@dataclass(slots=True)
class _Holder:
    requests: _Bucket
    tokens: _Bucket
    num_open: int = 0


class KeyUse:
    """What the holders of keys use, against what they may.

    Args:
        known: name to key, as they are now.
        clock: monotonic seconds.
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
        """Those of a key; none where no key is wanted, or it has been taken away meanwhile."""
        key = self._known().get(name)
        return KeyLimits() if key is None else key.limits

    def begin(self, name: str, num_tokens: int) -> Use:
        """A request has come with a key.

        Args:
            name: of the key.
            num_tokens: of its prompts.

        Raises:
            RateLimitError: its limits leave no room for it now.
        """
        limits, now = self.limits_of(name), self._clock()
        holder = self._holders.get(name)
        if holder is None:
            full = _Bucket(limits.requests or 0, now), _Bucket(limits.tokens or 0, now)
            holder = self._holders[name] = _Holder(*full)
        if limits.parallel is not None and holder.num_open >= limits.parallel:
            raise RateLimitError(
                f"this API key may have {counted(limits.parallel, 'request')} open at once",
                _PARALLEL_RETRY_AFTER,
            )
        if limits.requests is not None:
            seconds = holder.requests.seconds_until(1, limits.requests, now)
            if seconds:
                raise RateLimitError(
                    f"this API key may make {counted(limits.requests, 'request')} a minute", seconds
                )
        if limits.tokens is not None:
            # A prompt longer than a minute's tokens starts on a full bucket.
            wanted = min(num_tokens, limits.tokens)
            seconds = holder.tokens.seconds_until(wanted, limits.tokens, now)
            if seconds:
                raise RateLimitError(
                    f"this API key may use {counted(limits.tokens, 'token')} a minute", seconds
                )
        holder.requests.left -= 1
        use = Use(holder)
        use.take(num_tokens)
        return use


class Use:
    """One open request; `end` it in every case."""

    def __init__(self, holder: _Holder) -> None:
        self._holder = holder
        self._ended = False
        holder.num_open += 1

    def take(self, num_tokens: int) -> None:
        """So many tokens were read or written."""
        self._holder.tokens.left -= num_tokens

    def end(self) -> None:
        """It is over; more than once is once."""
        if not self._ended:
            self._ended = True
            self._holder.num_open -= 1
