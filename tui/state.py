"""What the dashboard knows, and how each thing that arrives changes it: pure functions.

Knows nothing of networks or widgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from appliance.events import Delta, Event, Info, Sequences, Snapshot, Stats
from appliance.tui.blocks import Blocks
from appliance.tui.history import History

if TYPE_CHECKING:
    from appliance.stats import SequenceView


class Phase(Enum):
    """How the connection to the server is."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"  # was refused, cut, or fell silent
    UNAUTHORIZED = "wrong key"  # the server wants another key
    FOREIGN = "not ours"  # something answers, but not an appliance


@dataclass(frozen=True, slots=True)
class Connection:
    """One change of the connection.

    Attributes:
        phase: how it is now.
        reason: why it is not live, in words.
        retry_at: when it is tried again, in seconds of the monotonic clock.
    """

    phase: Phase
    reason: str = ""
    retry_at: float = 0.0


FeedItem = Event | Connection


@dataclass(frozen=True, slots=True)
class Histories:
    """One value for each `Stats` event."""

    prompt_rate: History = field(default_factory=History)  # tokens per second
    generation_rate: History = field(default_factory=History)
    inter_token: History = field(default_factory=History)  # median, seconds
    kv_usage: History = field(default_factory=History)  # share of one

    def push(self, stats: Stats) -> Histories:
        """These histories and the numbers of one more moment."""
        return Histories(
            prompt_rate=self.prompt_rate.push(stats.prompt_tokens_per_second),
            generation_rate=self.generation_rate.push(stats.generation_tokens_per_second),
            inter_token=self.inter_token.push(stats.inter_token_latency.p50),
            kv_usage=self.kv_usage.push(stats.engine.kv_usage),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DashboardState:
    """Everything that is shown; None until the server has told it."""

    connection: Connection = Connection(Phase.CONNECTING)
    info: Info | None = None
    blocks: Blocks | None = None
    stats: Stats | None = None
    sequences: tuple[SequenceView, ...] = ()  # running ones first, oldest first
    history: Histories = field(default_factory=Histories)

    @property
    def current(self) -> bool:
        """Whether the map shows what the engine holds now."""
        ready = self.info is None or self.info.state == "ready"
        return self.connection.phase is Phase.LIVE and ready


def reduce(state: DashboardState, item: FeedItem) -> DashboardState:
    """The state after one more item of the feed.

    Raises:
        ValueError: the item contradicts itself or the map it is to change.
    """
    match item:
        case Connection():
            return replace(state, connection=item)
        case Info():
            return replace(state, info=item)
        case Snapshot():
            return replace(state, blocks=Blocks.of(item))
        case Delta():
            if state.blocks is None or state.blocks.epoch != item.epoch:
                return state
            return replace(state, blocks=state.blocks.after(item))
        case Stats():
            return replace(state, stats=item, history=state.history.push(item))
        case Sequences():
            return replace(state, sequences=_in_order(item.sequences))


def is_running(sequence: SequenceView) -> bool:
    """Whether it holds blocks, so that its slot means something."""
    return sequence.status == "running"


def _in_order(sequences: tuple[SequenceView, ...]) -> tuple[SequenceView, ...]:
    return tuple(
        sorted(
            sequences,
            key=lambda one: (not is_running(one), -one.age_seconds, one.request_id, one.index),
        )
    )
