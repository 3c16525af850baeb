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
        trial: its test; None if no way is sound.
        reason: why it is not the usually fastest way; empty if it is.
    """

    trial: LinkTrial | None
    reason: str = ""


def choose_link(trials: Sequence[LinkTrial], num_bytes: float) -> LinkChoice:
    """Choose the sound way that is the fastest for one exchange.

    Args:
        trials: of each way, the usually fastest first.
        num_bytes: what a rank sends in one exchange.
    """
    chosen = min(trials, key=lambda trial: trial.time_of(num_bytes))
    if chosen.problem:
        return LinkChoice(None, "; ".join(map(str, trials)))
    before, least = trials[: trials.index(chosen)], chosen.time_of(num_bytes)
    return LinkChoice(chosen, "; ".join(_why_not(trial, least, num_bytes) for trial in before))


def _why_not(trial: LinkTrial, least: float, num_bytes: float) -> str:
    if trial.problem:
        return str(trial)
    times = trial.time_of(num_bytes) / least
    return f"{trial.path.value} takes {times:.1f} times as long for {num_bytes:,.0f} bytes"
