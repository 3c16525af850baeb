"""One user's session with one server: the feed's state and the user's view of it.

Screens and the application hold it; it knows nothing of terminals. For going back it keeps the last
minutes of the feed, full states and the items between, up to a budget of bytes.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from appliance.tui.look import Look, PausedPicture, SequenceKey
from appliance.tui.recording import decode_item, encode_item
from appliance.tui.state import ConnectionPhase, DashboardState, reduce
from appliance.tui.view import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.stats import SequenceView
    from appliance.tui.controls import Controls
    from appliance.tui.recording import Recorder
    from appliance.tui.state import FeedItem


SEGMENT_SECONDS = 60.0
BUDGET_BYTES = 24 * 2**20
_HISTORIES_BYTES = 64 * 2**10  # rough size of a state besides its map
_LOST = (
    ConnectionPhase.LOST,
    ConnectionPhase.NO_KEY,
    ConnectionPhase.UNAUTHORIZED,
    ConnectionPhase.FOREIGN,
)


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


class Session:
    """Takes the feed's items and the user's choices.

    Args:
        url: the server's address as the user typed it.
        controls: commands for the same server; None for a recording.
        lettered: draw the map with letters, without half blocks or colours.

    Attributes:
        changed: called when the view settings change.
    """

    def __init__(
        self,
        url: str,
        *,
        controls: Controls | None = None,
        lettered: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.controls = controls
        self.state = DashboardState()
        self.look = Look()
        self.changed: Callable[[], object] = lambda: None
        self._url, self._lettered, self._recorder = url, lettered, recorder
        self.timeline = Timeline()

    def take(self, item: FeedItem) -> str:
        """Take an item; return a warning or "". Raises ValueError for an invalid item."""
        now = time.monotonic()
        before, self.state = self.state, reduce(self.state, item, now)
        self.timeline.add(item, before, now)
        if self._recorder is not None:
            self._recorder.write(item)
            if failure := self._recorder.failure:
                self._recorder = None
                return failure
        after = self.state.connection
        if before.connection.phase is ConnectionPhase.LIVE and after.phase in _LOST:
            return f"Connection lost: {after.reason}."
        return ""

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def view(self) -> View:
        """Build the current view; a sequence that has ended loses the focus."""
        view = View(
            url=self._url,
            latest=self.state,
            look=self.look,
            now=time.monotonic(),
            lettered=self._lettered,
            recording=self._recorder is not None,
        )
        if self.look.focus is not None and view.focused is None:
            self.look = replace(self.look, focus=None, ended=self.look.focus)
            view = replace(view, look=self.look)
        return view

    def change(self, **changes: object) -> None:
        if "focus" in changes:
            changes.setdefault("ended", None)
        self.look = replace(self.look, **changes)  # type: ignore[arg-type]  # names of its fields
        self.changed()

    def pause(self) -> None:
        held = PausedPicture(self.state, time.monotonic()) if self.look.held is None else None
        self.change(held=held)

    def rewind(self, seconds: float) -> None:
        """Go back in time; negative seconds go forward, and the end resumes."""
        now = time.monotonic()
        when = (now if self.look.held is None else self.look.held.at) - seconds
        if when >= now:
            self.change(held=None)
            return
        when = max(when, self.timeline.begin or now)
        state = self.timeline.state_at(when)
        if state is not None:
            self.change(held=PausedPicture(state, when))

    def focus_next(self, step: int) -> None:
        keys = [SequenceKey.of(sequence) for sequence in self.view().listed]
        if not keys:
            return
        if self.look.focus in keys:
            self.change(focus=keys[(keys.index(self.look.focus) + step) % len(keys)])
        else:
            self.change(focus=keys[0] if step > 0 else keys[-1])

    def why_not_abort(self, sequence: SequenceView | None) -> str:
        """Say why the focused sequence cannot be aborted and what to do; "" if it can."""
        if self.controls is None:
            return "A recording: it has nothing to abort."
        if sequence is None and (ended := self.look.ended) is not None:
            return f"It has ended: {ended.brief} cannot be aborted any more."
        if sequence is None:
            return "Choose a request first: tab or a click."
        if self.state.connection.phase is not ConnectionPhase.LIVE:
            return "No connection: the request cannot be aborted now."
        key = SequenceKey.of(sequence)
        if all(SequenceKey.of(one) != key for one in self.state.sequences):
            return f"It has ended since: {key.brief} cannot be aborted any more."
        if not sequence.yours:
            return (
                f"Not yours: this request is of {sequence.owner or 'another key'}. A key ends its"
                " own requests; set APPLIANCE_API_KEY to the key without a name to end any."
            )
        return ""
