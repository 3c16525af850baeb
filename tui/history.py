"""The last values of one number, for sparklines."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITY = 600  # ten minutes at one value a second


@dataclass(frozen=True, slots=True)
class History:
    """An immutable ring of values.

    Attributes:
        values: oldest first, at most `CAPACITY`.
        pushed: number of values ever pushed.
    """

    values: tuple[float, ...] = ()
    pushed: int = 0

    def push(self, value: float) -> History:
        """Return the history with one more value; a full ring drops its oldest."""
        return History((*self.values[-(CAPACITY - 1) :], value), self.pushed + 1)

    def columns(self, width: int, span: int) -> list[float]:
        """Average neighbours so that `span` values fill `width` columns of a graph.

        Groups have fixed boundaries: a full column never changes and moves as a whole, so a graph
        repaints little. With fewer than `span` values, each column averages one, two, four and so
        on.
        """
        if width <= 0:
            return []
        most, each = max(1, -(-span // width)), 1
        while each < most and self.pushed > width * each:
            each = min(2 * each, most)
        oldest = self.pushed - len(self.values)
        first = max(oldest, (max(0, self.pushed - 1) // each - width + 1) * each)
        columns, start = [], first
        while start < self.pushed:
            end = min(self.pushed, (start // each + 1) * each)
            part = self.values[start - oldest : end - oldest]
            columns.append(sum(part) / len(part))
            start = end
        return columns[-width:]

    @property
    def latest(self) -> float:
        """The newest value, 0 if there is none."""
        return self.values[-1] if self.values else 0.0

    @property
    def peak(self) -> float:
        """The largest value kept, 0 if there is none."""
        return max(self.values, default=0.0)
