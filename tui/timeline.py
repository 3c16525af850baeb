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
        open_bytes: how many these are.
        packed: the same once they have all come.
        size: bytes of all of it, roughly, once they have all come.
    """

    begin: float
    state: DashboardState
    lines: list[bytes] = field(default_factory=list)
    open_bytes: int = 0
    packed: bytes = b""
    size: int = 0

    def close(self) -> None:
        """No more items come."""
        self.packed = zlib.compress(b"\n".join(self.lines), level=1)
        self.lines, self.open_bytes = [], 0
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
        self._most_open = budget // 8  # of one segment, as when a recording is played fast
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
        return self._closed_bytes + (last.open_bytes if last else 0)

    def add(self, item: FeedItem, before: DashboardState, now: float) -> None:
        """Remember an item.

        Args:
            item: what arrived.
            before: the state without it.
            now: when it did.
        """
        last = self._segments[-1] if self._segments else None
        if last is None or now - last.begin >= SEGMENT_SECONDS or last.open_bytes > self._most_open:
            if last is not None:
                last.close()
                self._closed_bytes += last.size
            self._segments.append(Segment(now, before))
            while self._closed_bytes > self._budget and len(self._segments) > 1:
                self._closed_bytes -= self._segments.popleft().size
        line = encode_item(item, now)
        self._segments[-1].lines.append(line)
        self._segments[-1].open_bytes += len(line)

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
