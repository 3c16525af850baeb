"""How fast this machine computes prompts and moves blocks, measured while it does. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 16  # of a step that tells how fast prompts are computed
_WEIGHT = 0.2  # of the newest measurement


@dataclass(slots=True)
class Rates:
    """Moving averages; 0 until something was measured."""

    prefill: float = 0.0  # tokens per second
    moves: float = 0.0  # bytes per second, one way

    def saw_step(self, num_rows: int, seconds: float) -> None:
        """Learn from a step that held prompts."""
        if num_rows >= MIN_ROWS and seconds > 0:
            self.prefill = moving_average(self.prefill, num_rows / seconds)

    def saw_moves(self, num_bytes: int, seconds: float) -> None:
        """Learn from blocks that were moved."""
        if num_bytes and seconds > 0:
            self.moves = moving_average(self.moves, num_bytes / seconds)


def moving_average(before: float, now: float) -> float:
    """An average that follows what is measured; 0 is none so far."""
    return now if before == 0 else before + _WEIGHT * (now - before)
