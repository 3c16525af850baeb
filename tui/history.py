"""The last values of one number, for sparklines."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITY = 600  # ten minutes at one value a second


@dataclass(frozen=True, slots=True)
class History:
    """A ring of values, oldest first; pushing returns a new one."""

    values: tuple[float, ...] = ()

    def push(self, value: float) -> History:
        """This history and one more value; the oldest leaves when the ring is full."""
        return History((*self.values[-(CAPACITY - 1) :], value))

    @property
    def peak(self) -> float:
        """The largest value kept, 0 if there is none."""
        return max(self.values, default=0.0)
