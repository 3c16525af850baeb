"""The last minutes of the feed, for going back: full states and the items between.

It drops the oldest segments beyond its byte budget.
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
_HISTORIES_BYTES = 64 * 2**10  # rough size of a state besides its map


@dataclass(slots=True)
class Segment:
    """A state and the items after it.

    Attributes:
        begin: time of the state, in seconds of the caller's clock.
        lines: the encoded items of an open segment.
        packed: the items of a closed segment, compressed.
        size: rough bytes of a closed segment.
    """

    begin: float
    state: DashboardState
    lines: list[bytes] = field(default_factory=list)
    open_bytes: int = 0
    packed: bytes = b""
    size: int = 0

    def close(self) -> None:
        self.packed = zlib.compress(b"\n".join(self.lines), level=1)
        self.lines, self.open_bytes = [], 0
        self.size = len(self.packed) + _size_of(self.state)

    def items(self) -> list[bytes]:
        return (
            self.lines or zlib.decompress(self.packed).splitlines() if self.packed else self.lines
        )


class Timeline:
    """Returns the state at any recent time.

    Args:
        budget: rough limit in bytes.
    """

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self._budget = budget
        self._most_open = budget // 8  # bytes of one segment; a recording played fast fills it
        self._segments: deque[Segment] = deque()
        self._closed_bytes = 0

    @property
    def begin(self) -> float | None:
        return self._segments[0].begin if self._segments else None

    @property
    def num_bytes(self) -> int:
        """Rough bytes of everything kept."""
        last = self._segments[-1] if self._segments else None
        return self._closed_bytes + (last.open_bytes if last else 0)

    def add(self, item: FeedItem, before: DashboardState, now: float) -> None:
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
        """Return the state at a time; None if the time is before the first one kept."""
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
