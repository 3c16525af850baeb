"""Limits on restarting an engine process, and the delays between restarts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.engine.process.watch import LOOKS_TO_HANG


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Limits on restarting a process, in seconds."""

    hang_timeout: float = 8.0  # for a process with work that does nothing
    step_timeout: float = 60.0  # for a process that computes without progress
    backoff: float = 1.0  # before the second restart in the window, then 3, 7, ...
    max_backoff: float = 60.0
    death_window: float = 600.0

    @property
    def look(self) -> float:
        """Seconds between two looks at the process."""
        return self.hang_timeout / LOOKS_TO_HANG


class Wakes(NamedTuple):
    """Number of wakes after sleep, and the last one's seconds."""

    number: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Deaths:
    """Counts recent deaths and sets the delay before the next start."""

    limits: SupervisionLimits
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def count(self) -> float:
        """Record a death; return the seconds to wait."""
        now = self.clock()
        self._times.append(now)
        while now - self._times[0] > self.limits.death_window:
            self._times.popleft()
        delay: float = self.limits.backoff * (2 ** (len(self._times) - 1) - 1)
        return min(delay, self.limits.max_backoff)
