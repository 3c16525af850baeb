"""The user's view settings, shared by all screens."""

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
    """Identifies a sequence over its whole life, since slots are reused."""

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
    """Sort column of the request table; numbers sort largest first."""

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
class PausedPicture:
    """A paused picture.

    Attributes:
        at: its time, in seconds of the monotonic clock.
    """

    state: DashboardState
    at: float


@dataclass(frozen=True, slots=True)
class Look:
    """Everything the user can choose.

    Attributes:
        mode: meaning of the block map's colours.
        ended: the sequence that had the focus until it ended.
        level: zoom into the map, 0 for all of it.
        cursor: physical block under the cursor.
        query: words that a table line must contain.
        log_back: lines the log is scrolled back.
        facts_down: lines the model screen is scrolled down.
    """

    mode: ColorMode = ColorMode.OWNER
    focus: SequenceKey | None = None
    ended: SequenceKey | None = None
    held: PausedPicture | None = None
    level: int = 0
    cursor: int | None = None
    sort: Sort = Sort.AGE
    ascending: bool = False
    query: str = ""
    log_back: int = 0
    facts_down: int = 0
