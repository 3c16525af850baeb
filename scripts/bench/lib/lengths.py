"""Lengths of prompts and answers, drawn from log-normal distributions."""

from __future__ import annotations

import math
import random


def lengths(
    count: int, mean: float, spread: float, *, least: int, most: int, seed: int
) -> list[int]:
    """Draw lengths from a log-normal distribution and cut them to the limits.

    Args:
        count: how many.
        mean: of the law.
        spread: standard deviation of the logarithm.
        least: smallest number given out.
        most: largest number given out.
        seed: same seed, same numbers.
    """
    draw = random.Random(seed)
    center = math.log(mean) - spread**2 / 2
    drawn = (round(draw.lognormvariate(center, spread)) for _ in range(count))
    return [min(most, max(least, number)) for number in drawn]
