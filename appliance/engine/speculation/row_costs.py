"""Learns the duration of answers' steps by their number of rows. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import exp, log

# Without measurements seconds grow with this power of the rows: higher than any model needs (0.4 to
# 0.7 in `scripts/bench/results/cpu/models.json`), so that it tries only promising drafts.
_GUESS = 0.75
_NEW = 1 / 8  # weight of a new step in a mean
_OUTLIER = 3.0  # a slower step counts as this many times its mean
_TRUSTED = 3  # steps; with fewer, the fastest counts
_STALE = 4096  # steps after which it forgets a duration that it has not seen again


@dataclass(slots=True)
class _Mean:
    seconds: float
    count: int
    step: int  # the last one


class RowCosts:
    """Mean durations by rows, interpolated by a power of the rows."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._rows: list[int] = []  # with a mean, in order
        self._step = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step with answers only."""
        if rows <= 0 or seconds <= 0:
            return
        self._step += 1
        mean = self._means.get(rows)
        if mean is None:
            self._means[rows] = _Mean(seconds, 1, self._step)
            insort(self._rows, rows)
            self._forget()
            return
        mean.count += 1
        mean.step = self._step
        if mean.count <= _TRUSTED:
            mean.seconds = min(mean.seconds, seconds)
        else:
            mean.seconds += _NEW * (min(seconds, _OUTLIER * mean.seconds) - mean.seconds)

    def seconds(self, rows: int) -> float:
        """Predict a step's duration; 0 before anything was learned."""
        known = self._rows
        if not known:
            return 0.0
        mean = self._means.get(rows)
        if mean is not None:
            return mean.seconds
        place = bisect_left(known, rows)
        if place == 0:
            return self._scaled(known[0], rows)
        if place == len(known):
            return self._scaled(known[-1], rows)
        low, high = known[place - 1], known[place]
        share = log(rows / low) / log(high / low)
        first, last = self._means[low].seconds, self._means[high].seconds
        return exp((1 - share) * log(first) + share * log(last))

    def _scaled(self, known: int, rows: int) -> float:
        return float(self._means[known].seconds * (rows / known) ** _GUESS)

    def _forget(self) -> None:
        old = [rows for rows, mean in self._means.items() if mean.step < self._step - _STALE]
        for rows in old:
            del self._means[rows]
            self._rows.remove(rows)
