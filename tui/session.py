"""One user's session with one server: the feed's state and the user's view of it.

Screens and the application hold it; it knows nothing of terminals.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.tui.look import Look, PausedPicture, SequenceKey
from appliance.tui.state import ConnectionPhase, DashboardState, reduce
from appliance.tui.timeline import Timeline
from appliance.tui.view import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.stats import SequenceView
    from appliance.tui.controls import Controls
    from appliance.tui.recording import Recorder
    from appliance.tui.state import FeedItem

_LOST = (
    ConnectionPhase.LOST,
    ConnectionPhase.NO_KEY,
    ConnectionPhase.UNAUTHORIZED,
    ConnectionPhase.FOREIGN,
)


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
