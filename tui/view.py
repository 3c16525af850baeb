"""What one paint shows: the state of the server, and how the person at the keyboard looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.events import NO_OWNER
from appliance.tui.raster import ColorMode
from appliance.tui.state import DashboardState, Phase, is_running

if TYPE_CHECKING:
    from appliance.stats import SequenceView


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Names one sequence over its life; slots are handed on."""

    request_id: str
    choice: int

    @classmethod
    def of(cls, sequence: SequenceView) -> SequenceKey:
        """The key of a sequence."""
        return cls(sequence.request_id, sequence.index)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Everything a widget may read when it draws.

    Attributes:
        url: the server, as it was given.
        state: what the server has told; stands still while paused.
        connection_state: the same, always current.
        mode: what the colours of the block map mean.
        focus: the sequence to bring out.
        paused: whether the picture stands still on request.
        now: monotonic seconds.
    """

    url: str
    state: DashboardState
    connection_state: DashboardState
    mode: ColorMode = ColorMode.OWNER
    focus: SequenceKey | None = None
    paused: bool = False
    now: float = 0.0

    @property
    def focused(self) -> SequenceView | None:
        """The sequence in focus, if it still lives."""
        for sequence in self.state.sequences:
            if SequenceKey.of(sequence) == self.focus:
                return sequence
        return None

    @property
    def focus_slot(self) -> int | None:
        """Owner slot to bring out in the block map; `NO_OWNER` if the sequence holds no block."""
        sequence = self.focused
        if sequence is None:
            return None
        return sequence.slot if is_running(sequence) else NO_OWNER

    @property
    def retry_words(self) -> str:
        """When the next attempt to connect is."""
        seconds = round(self.connection_state.connection.retry_at - self.now)
        return f"retrying in {seconds} s" if seconds > 0 else "retrying now"

    @property
    def connection_words(self) -> str:
        """How the connection is, in a few words."""
        connection = self.connection_state.connection
        match connection.phase:
            case Phase.CONNECTING:
                return "connecting"
            case Phase.LIVE:
                return "paused" if self.paused else "live"
            case Phase.LOST:
                return f"lost, {self.retry_words}"
            case Phase.UNAUTHORIZED:
                return f"wrong key, {self.retry_words}"
            case Phase.FOREIGN:
                return f"not an appliance, {self.retry_words}"
