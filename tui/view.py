"""All that one frame shows: the server's state and the user's view settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from appliance.events import NO_OWNER
from appliance.tui import palette
from appliance.tui.look import Look, SequenceKey, Sort
from appliance.tui.raster import Emphasis, letter_of
from appliance.tui.state import ConnectionPhase, DashboardState, is_running

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.events import BlockTable
    from appliance.stats import SequenceView
    from appliance.tui.raster import ColorMode


@dataclass(frozen=True, eq=False)
class View:
    """All that a widget may read when it draws.

    Attributes:
        url: the server's address as the user typed it.
        now: monotonic seconds.
        lettered: draw the map with letters, without half blocks or colours.
        recording: the feed is being written to a file.
    """

    url: str
    latest: DashboardState
    look: Look = field(default_factory=Look)
    now: float = 0.0
    lettered: bool = False
    recording: bool = False

    @property
    def state(self) -> DashboardState:
        """The state to show: the latest, unless paused."""
        return self.latest if self.look.held is None else self.look.held.state

    @property
    def clock(self) -> float:
        """The time shown, in seconds of the monotonic clock."""
        return self.now if self.look.held is None else self.look.held.at

    @property
    def paused(self) -> bool:
        return self.look.held is not None

    @property
    def mode(self) -> ColorMode:
        return self.look.mode

    @property
    def focus(self) -> SequenceKey | None:
        return self.look.focus

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Names of live sequences' adapters, in the order of their hues."""
        return tuple(sorted({one.adapter for one in self.state.sequences if one.adapter}))

    @cached_property
    def adapter_of_slot(self) -> dict[int, int]:
        """Index into `adapters` by owner slot of the running sequences that have one."""
        return {
            one.slot: self.adapters.index(one.adapter)
            for one in self.state.sequences
            if one.adapter and is_running(one)
        }

    def whole(self) -> View:
        """Return the view with the whole block map and no cursor."""
        return replace(self, look=replace(self.look, level=0, cursor=None))

    @cached_property
    def focused(self) -> SequenceView | None:
        """The focused sequence, if it is still live."""
        for sequence in self.state.sequences:
            if SequenceKey.of(sequence) == self.focus:
                return sequence
        return None

    @property
    def table(self) -> BlockTable | None:
        """Block table of the focused sequence, once it has arrived."""
        table, focus = self.state.table, self.focus
        if table is None or focus is None:
            return None
        return table if SequenceKey(table.request_id, table.index) == focus else None

    @cached_property
    def emphasis(self) -> Emphasis:
        sequence, table = self.focused, self.table
        slot = None
        if sequence is not None:
            slot = sequence.slot if is_running(sequence) else NO_OWNER
        blocks = frozenset(entry.block for entry in table.blocks) if table else frozenset()
        return Emphasis(slot, blocks, stale=not self.latest.current)

    @cached_property
    def listed(self) -> tuple[SequenceView, ...]:
        """The sequences that match the filter, sorted."""
        words = self.look.query.casefold().split()
        kept = (
            one for one in self.state.sequences if all(word in _searchable(one) for word in words)
        )
        if self.look.sort is Sort.AGE:
            ordered = list(kept)  # as the state has them
            return tuple(reversed(ordered) if self.look.ascending else ordered)
        key, largest_first = _SORTS[self.look.sort]
        return tuple(sorted(kept, key=key, reverse=largest_first is not self.look.ascending))

    def swatch(self, sequence: SequenceView) -> tuple[str, str]:
        """Return a sequence's mark on the map, and its colour."""
        if not is_running(sequence):
            return " " if self.lettered else "■", palette.FAINT
        letter = letter_of(sequence.slot) if self.lettered else "■"
        return letter, palette.owner_hue(sequence.slot)

    @property
    def retry_words(self) -> str:
        """Time until the next connection attempt."""
        seconds = round(self.latest.connection.retry_at - self.now)
        return f"retrying in {seconds} s" if seconds > 0 else "retrying now"

    @property
    def connection_words(self) -> str:
        match self.latest.connection.phase:
            case ConnectionPhase.CONNECTING:
                return "connecting"
            case ConnectionPhase.LIVE:
                if self.look.held is None:
                    return "live"
                back = round(self.now - self.look.held.at)
                return f"paused, {back} s ago" if back > 1 else "paused"
            case ConnectionPhase.LOST:
                return f"lost, {self.retry_words}"
            case ConnectionPhase.NO_KEY | ConnectionPhase.UNAUTHORIZED as phase:
                return f"{phase.value}, {self.retry_words}"
            case ConnectionPhase.FOREIGN:
                return f"not an appliance, {self.retry_words}"
            case ConnectionPhase.ENDED:
                return "end of the recording"


def _searchable(sequence: SequenceView) -> str:
    own = (sequence.request_id, sequence.owner, sequence.status)
    return " ".join((*own, sequence.model, sequence.adapter)).casefold()


_SORTS: dict[Sort, tuple[Callable[[SequenceView], Any], bool]] = {
    Sort.REQUEST: (lambda one: one.request_id, False),
    Sort.KEY: (lambda one: one.owner, False),
    Sort.ADAPTER: (lambda one: one.adapter, False),
    Sort.STATE: (lambda one: one.status, False),
    Sort.PROMPT: (lambda one: one.prompt_tokens, True),
    Sort.CACHED: (lambda one: one.cached_tokens, True),
    Sort.GENERATED: (lambda one: one.output_tokens, True),
    Sort.SPEED: (lambda one: one.tokens_per_second, True),
    Sort.BLOCKS: (lambda one: one.blocks, True),
}
