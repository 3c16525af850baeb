"""A link between two ranks, its test with random data, and the choice among tested ones.

The data must return unchanged. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


# Two ways between two ranks, tested one after another, stay below the 5 seconds of a start.
TRIAL_SECONDS = 2.0
SMALL, LARGE = 16, 1 << 20  # numbers of 4 bytes
# Most rounds of each message in turn; the first touches memory that nothing has touched before.
_ROUNDS = {SMALL: (1, *(4,) * 8), LARGE: (1, 4)}
_NEVER = float("inf")
_MOST = 1 << 24  # a float32 holds all whole numbers below


class LinkPath(Enum):
    """The memory through which data pass from rank to rank."""

    PEER = "peer to peer"
    HOST = "through host memory"
    SHARED = "shared memory"
    SOCKET = "sockets of this machine"


class LinkTimeoutError(Exception):
    """Data did not come back in time."""


class Link(Protocol):
    """One way to another rank; the other end echoes everything it receives."""

    @property
    def path(self) -> LinkPath:
        """The memory that it passes."""
        ...

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send float32 numbers there and back, and repeat with the received ones.

        Args:
            data: (count,) whole numbers below 2^24, which no sum rounds.
            rounds: number of round trips.
            limit: seconds for all rounds.

        Returns:
            The last numbers received, and the seconds of all rounds.

        Raises:
            LinkTimeoutError: it takes longer than the limit.
        """
        ...


# A short message over a link that slows every step: shared memory takes some 10 us on an idle
# machine, and half a millisecond on one with nine times as much work as processors.
SLOW_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The cost of a message.

    Attributes:
        seconds: of a message of a few bytes, one way.
        bytes_per_second: of a long one.
    """

    seconds: float
    bytes_per_second: float

    def time_of(self, num_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.seconds + num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{1e6 * self.seconds:,.1f} us, {self.bytes_per_second / 1e9:,.1f} GB/s"


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """The result of a test.

    Attributes:
        speed: None if there is a problem.
        problem: why the link is unsound; empty if it is sound.
    """

    path: LinkPath
    speed: LinkSpeed | None
    problem: str = ""

    @property
    def is_slow(self) -> bool:
        """True if a sound link slows every step."""
        return self.speed is not None and self.speed.seconds > SLOW_SECONDS

    def time_of(self, num_bytes: float = 0.0) -> float:
        """Return the seconds of one message, infinite over an unsound link."""
        return float("inf") if self.speed is None else self.speed.time_of(num_bytes)

    def __str__(self) -> str:
        return f"{self.path.value} {self.problem or self.speed}"


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
