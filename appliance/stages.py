"""The stages of a start and the seconds each took, over both processes.

Times are of the system's monotonic clock, which all processes of a machine share. A leaf.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

Stage = tuple[str, float]  # its name, and the monotonic time at its end


def process_start() -> float:
    """Return when this process began, in seconds of the monotonic clock, to 10 ms.

    Field 22 of /proc/self/stat, which counts from the system's start (`man 5 proc`).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def durations(begin: float, stages: tuple[Stage, ...]) -> dict[str, float]:
    """Return the seconds of each stage; those before `begin` took none."""
    found: dict[str, float] = {}
    for name, end in stages:
        found[name] = max(0.0, end - begin)
        begin = max(begin, end)
    return found


def in_words(begin: float, stages: tuple[Stage, ...]) -> str:
    """Format the whole and its stages, such as "1.9 s: imports 1.1, weights 0.8"."""
    parts = durations(begin, stages)
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    return f"{sum(parts.values()):.1f} s: {listed}"
