"""Chooses among tested ways between two ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.links.link import LinkTrial


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """The way that steps take.

    Attributes:
        trial: of it; None if none may be used.
        reason: why it is not the way that usually is the fastest; empty if it is.
    """

    trial: LinkTrial | None
    reason: str = ""


def choose_link(trials: Sequence[LinkTrial], num_bytes: float) -> LinkChoice:
    """Choose the sound way that is the fastest for one exchange.

    Args:
        trials: that which usually is the fastest first.
        num_bytes: that a rank gives in an exchange.
    """
    times = {
        place: trial.speed.time_of(num_bytes)
        for place, trial in enumerate(trials)
        if trial.speed is not None
    }
    if not times:
        return LinkChoice(None, "; ".join(map(str, trials)))
    chosen = min(times, key=lambda place: times[place])
    reason = "; ".join(_why_not(trial, times[chosen], num_bytes) for trial in trials[:chosen])
    return LinkChoice(trials[chosen], reason)


def _why_not(trial: LinkTrial, least: float, num_bytes: float) -> str:
    if trial.speed is None:
        return str(trial)
    times = trial.speed.time_of(num_bytes) / least
    return f"{trial.path.value} takes {times:.1f} times as long for {num_bytes:,.0f} bytes"
