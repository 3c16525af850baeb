"""The stages of a start, over both processes, and their seconds.

Times are of the system's monotonic clock, which all processes share. A leaf.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

Stage = tuple[str, float]  # its name and monotonic end time


def process_start() -> float:
    """Return the monotonic time at which this process began, to 10 ms.

    Reads field 22 of /proc/self/stat, ticks since boot (`man 5 proc`).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def durations(begin: float, stages: tuple[Stage, ...]) -> dict[str, float]:
    """Return the seconds of each stage; a stage that ended before `begin` took none."""
    found: dict[str, float] = {}
    for name, end in stages:
        found[name] = max(0.0, end - begin)
        begin = max(begin, end)
    return found


def in_words(begin: float, stages: tuple[Stage, ...]) -> str:
    """Format the total and its stages, such as "1.9 s: imports 1.10, weights 0.80"."""
    parts = durations(begin, stages)
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    return f"{sum(parts.values()):.1f} s: {listed}"
