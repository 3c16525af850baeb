"""The user's view settings: one value that every screen shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from appliance.tui.raster import ColorMode

if TYPE_CHECKING:
    from appliance.stats import SequenceView
    from appliance.tui.state import DashboardState

_BRIEF = 40  # letters


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Identifies a sequence over its whole life; slots are reused."""

    request_id: str
    choice: int

    @classmethod
    def of(cls, sequence: SequenceView) -> SequenceKey:
        return cls(sequence.request_id, sequence.index)

    @property
    def brief(self) -> str:
        """The request id, shortened for messages."""
        name = self.request_id
        return name if len(name) <= _BRIEF else f"{name[: _BRIEF - 1]}…"


class Sort(Enum):
    """Order of the request table; numbers start with the largest."""

    AGE = "age"
    REQUEST = "request"
    KEY = "key"
    ADAPTER = "adapter"
    STATE = "state"
    PROMPT = "prompt"
    CACHED = "cached"
    GENERATED = "generated"
    SPEED = "tok/s"
    BLOCKS = "blocks"

    @property
    def next(self) -> Sort:
        sorts = list(Sort)
        return sorts[(sorts.index(self) + 1) % len(sorts)]


@dataclass(frozen=True, slots=True)
class Held:
    """A paused picture.

    Attributes:
        state: the state shown.
        at: its time, in seconds of the monotonic clock.
    """

    state: DashboardState
    at: float


@dataclass(frozen=True, slots=True)
class Look:
    """Everything the user can choose.

    Attributes:
        mode: meaning of the block map's colours.
        focus: the highlighted sequence.
        ended: the one highlighted until it ended, if no other was chosen since.
        held: the paused picture.
        level: zoom into the map, 0 for all of it.
        cursor: physical block under the cursor.
        sort: order of the request table.
        ascending: reverse that order.
        query: words that lines of that table must contain.
        log_back: lines that the log is scrolled back.
        facts_down: lines that the model screen's facts are scrolled down.
    """

    mode: ColorMode = ColorMode.OWNER
    focus: SequenceKey | None = None
    ended: SequenceKey | None = None
    held: Held | None = None
    level: int = 0
    cursor: int | None = None
    sort: Sort = Sort.AGE
    ascending: bool = False
    query: str = ""
    log_back: int = 0
    facts_down: int = 0
