"""A token bucket: a budget that refills evenly."""

from __future__ import annotations

from collections.abc import Callable


class Bucket:
    """Starts full. Taking more than it holds overdraws it; it repays the debt first.

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
