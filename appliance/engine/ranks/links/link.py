"""Interface of a link between two ranks, and the result of its test. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
