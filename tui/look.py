"""How the person at the keyboard looks at the server: one value that every screen shares."""

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
    """Names one sequence over its life; slots are handed on."""

    request_id: str
    choice: int

    @classmethod
    def of(cls, sequence: SequenceView) -> SequenceKey:
        """The key of a sequence."""
        return cls(sequence.request_id, sequence.index)

    @property
    def brief(self) -> str:
        """The request in a message, whose other words matter more."""
        name = self.request_id
        return name if len(name) <= _BRIEF else f"{name[: _BRIEF - 1]}…"


class Sort(Enum):
    """What the table of requests is ordered by; numbers begin with the largest."""

    AGE = "age"
    REQUEST = "request"
    KEY = "key"
    STATE = "state"
    PROMPT = "prompt"
    CACHED = "cached"
    GENERATED = "generated"
    SPEED = "tok/s"
    BLOCKS = "blocks"

    @property
    def next(self) -> Sort:
        """The order that the key switches to."""
        sorts = list(Sort)
        return sorts[(sorts.index(self) + 1) % len(sorts)]


@dataclass(frozen=True, slots=True)
class Held:
    """A picture that stands still.

    Attributes:
        state: what it shows.
        at: the moment it shows, in seconds of the monotonic clock.
    """

    state: DashboardState
    at: float


@dataclass(frozen=True, slots=True)
class Look:
    """Everything a person can choose.

    Attributes:
        mode: what the colours of the block map mean.
        focus: the sequence to bring out.
        ended: the one that was brought out until it ended, if no other was chosen since.
        held: what is shown while the picture stands still.
        level: of the zoom into the map, 0 for all of it.
        cursor: physical block that is looked at.
        sort: order of the table of requests.
        ascending: the other way round.
        query: what lines of that table must contain.
        log_back: lines that the log is scrolled back.
        facts_down: lines that the facts of the model page are scrolled down.
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
