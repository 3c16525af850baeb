"""Tests a link with random data, which must return unchanged, and chooses among tested ones.

Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.ranks.links.link import LinkSpeed, LinkTimeoutError, LinkTrial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.ranks.links.link import Link

# Two ways between two ranks, tested one after another, stay below the 5 seconds of a start.
TRIAL_SECONDS = 2.0
SMALL, LARGE = 16, 1 << 20  # numbers of 4 bytes
# Most rounds of each message in turn; the first touches memory that nothing has touched before.
_ROUNDS = {SMALL: (1, *(4,) * 8), LARGE: (1, 4)}
_NEVER = float("inf")
_MOST = 1 << 24  # a float32 holds all whole numbers below


def new_seed() -> int:
    """Return a seed that no earlier test used."""
    return int.from_bytes(os.urandom(4), "little")


def try_link(link: Link, seed: int, limit: float = TRIAL_SECONDS) -> LinkTrial:
    """Measure latency and bandwidth, and compare all received data.

    Takes the fastest message: other work on the machine only slows a link.

    Args:
        seed: of the data.
        limit: seconds for the whole test.
    """
    noise, left = np.random.default_rng(seed), limit
    one_way: list[float] = []  # of each size
    for count, each in _ROUNDS.items():
        fastest = _NEVER
        for most in each:
            # On a machine full of other work the next message may take several times as long.
            rounds = min(most, int(left / 8 / (2 * fastest))) if fastest < _NEVER else most
            if rounds == 0:  # there is no time for another
                break
            data = noise.integers(0, _MOST, count).astype(np.float32)
            try:
                back, seconds = link.echo(data, rounds, left)
            except LinkTimeoutError:
                what = f"{data.nbytes:,} bytes, {rounds} times there and back, {left:.1f} s"
                return LinkTrial(link.path, None, f"did not answer in time: {what}")
            if wrong := int(np.count_nonzero(back != data)):
                what = f"{wrong:,} of {count:,} numbers that came back were others"
                return LinkTrial(link.path, None, f"changes data: {what}")
            left -= seconds
            fastest = min(fastest, max(seconds, 1e-9) / (2 * rounds))
        one_way.append(fastest)
    latency, whole = one_way
    return LinkTrial(link.path, LinkSpeed(latency, 4 * LARGE / whole))


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
