"""Links with planted faults, on a clock of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.engine.ranks.link import LinkPath, LinkSpeed, LinkTimeoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class FakeLink:
    """A link that takes the time of its speed.

    Attributes:
        hangs_after: messages that come back before it hangs; None: it never does.
        breaks_after: messages before it adds one to a number; None: it never does.
        spent: seconds so far.
    """

    path: LinkPath
    speed: LinkSpeed
    hangs_after: int | None = None
    breaks_after: int | None = None
    messages: int = 0
    spent: float = 0.0

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        seconds, back = 0.0, data.copy()
        for _ in range(rounds):
            seconds += 2 * self.speed.time_of(data.nbytes)
            if self.messages == self.hangs_after or seconds > limit:
                self.spent += limit
                raise LinkTimeoutError
            if self.messages == self.breaks_after:
                back[data.size // 2] += 1
            self.messages += 1
        self.spent += seconds
        return back, seconds
