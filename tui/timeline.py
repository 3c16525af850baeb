"""The last minutes of the feed, so that a person can scroll back: whole states, and what followed.

Memory is bounded: what is older than the budget allows is forgotten.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.tui.recording import decode_item, encode_item
from appliance.tui.state import reduce

if TYPE_CHECKING:
    from appliance.tui.state import DashboardState, FeedItem

SEGMENT_SECONDS = 60.0
BUDGET_BYTES = 24 * 2**20
_HISTORIES_BYTES = 64 * 2**10  # what a state holds besides its map, roughly


@dataclass(slots=True)
class Segment:
    """A state, and the items that came after it.

    Attributes:
        begin: when the state was, in seconds of the caller's clock.
        state: from which the items start.
        lines: the items while they still come.
        packed: the same once they have all come.
    """

    begin: float
    state: DashboardState
    lines: list[bytes] = field(default_factory=list)
    packed: bytes = b""
    size: int = 0

    def close(self) -> None:
        """No more items come."""
        self.packed = zlib.compress(b"\n".join(self.lines), level=1)
        self.lines = []
        self.size = len(self.packed) + _size_of(self.state)

    def items(self) -> list[bytes]:
        """The items, oldest first."""
        return (
            self.lines or zlib.decompress(self.packed).splitlines() if self.packed else self.lines
        )


class Timeline:
    """What was shown when.

    Args:
        budget: bytes to keep at most, roughly.
    """

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self._budget = budget
        self._segments: deque[Segment] = deque()
        self._closed_bytes = 0

    @property
    def begin(self) -> float | None:
        """The earliest moment that can be gone back to."""
        return self._segments[0].begin if self._segments else None

    @property
    def num_bytes(self) -> int:
        """What is kept, roughly."""
        last = self._segments[-1] if self._segments else None
        return self._closed_bytes + (sum(map(len, last.lines)) if last else 0)

    def add(self, item: FeedItem, before: DashboardState, now: float) -> None:
        """Remember an item.

        Args:
            item: what arrived.
            before: the state without it.
            now: when it did.
        """
        if not self._segments or now - self._segments[-1].begin >= SEGMENT_SECONDS:
            if self._segments:
                self._segments[-1].close()
                self._closed_bytes += self._segments[-1].size
            self._segments.append(Segment(now, before))
            while self._closed_bytes > self._budget and len(self._segments) > 1:
                self._closed_bytes -= self._segments.popleft().size
        self._segments[-1].lines.append(encode_item(item, now))

    def state_at(self, when: float) -> DashboardState | None:
        """What was known at a moment; None before the first one kept."""
        segment = next((one for one in reversed(self._segments) if one.begin <= when), None)
        if segment is None:
            return None
        state = segment.state
        for line in segment.items():
            at, item = decode_item(line)
            if at > when:
                break
            if item is not None:
                state = reduce(state, item, at)
        return state


def _size_of(state: DashboardState) -> int:
    blocks = state.blocks
    return _HISTORIES_BYTES + (0 if blocks is None else blocks.cells.nbytes + blocks.changed.nbytes)
