"""Measures the speed of prefill and of moving blocks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 16  # minimum of a step that measures prefill
_WEIGHT = 0.2  # of a new measurement


@dataclass(slots=True)
class Rates:
    """Moving averages; 0 before the first measurement."""

    prefill: float = 0.0  # tokens per second
    moves: float = 0.0  # bytes per second, one way

    def saw_step(self, num_rows: int, seconds: float) -> None:
        if num_rows >= MIN_ROWS and seconds > 0:
            self.prefill = moving_average(self.prefill, num_rows / seconds)

    def saw_moves(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self.moves = moving_average(self.moves, num_bytes / seconds)


def moving_average(before: float, now: float) -> float:
    """Update an exponential moving average; 0 means none so far."""
    return now if before == 0 else before + _WEIGHT * (now - before)
