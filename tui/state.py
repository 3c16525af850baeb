"""The dashboard's state, and a pure function that applies an item of the feed to it.

Knows nothing of networks or widgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from appliance.events import (
    BlockTable,
    Delta,
    Event,
    Info,
    Job,
    Log,
    LogLine,
    Sequences,
    Snapshot,
    Stats,
)
from appliance.tui.blocks import Blocks
from appliance.tui.history import History

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.stats import SequenceView


class ConnectionPhase(Enum):
    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"  # refused, cut, or silent
    NO_KEY = "key needed"  # the server needs a key, and none was sent
    UNAUTHORIZED = "wrong key"  # the server wants another key
    FOREIGN = "not ours"  # something answers, but it is not an appliance
    ENDED = "ended"  # a recording was played to its end


@dataclass(frozen=True, slots=True)
class ConnectionChange:
    """One change of the connection.

    Attributes:
        reason: why the connection is not live.
        retry_at: time of the next attempt, in seconds of the monotonic clock.
    """

    phase: ConnectionPhase
    reason: str = ""
    retry_at: float = 0.0


FeedItem = Event | BlockTable | ConnectionChange
MAX_LOG_LINES = 500


@dataclass(frozen=True, slots=True)
class Histories:
    """Histories of numbers; each `Stats` event adds one value to each."""

    prompt_rate: History = field(default_factory=History)  # tokens per second
    generation_rate: History = field(default_factory=History)
    first_token: History = field(default_factory=History)  # median, seconds
    inter_token: History = field(default_factory=History)
    inter_token_p99: History = field(default_factory=History)
    kv_usage: History = field(default_factory=History)  # share of one
    prefill_rows: History = field(default_factory=History)  # mean of a second's steps
    decode_rows: History = field(default_factory=History)
    waiting: History = field(default_factory=History)  # requests
    hit_rate: History = field(default_factory=History)  # of tokens looked up since the last event
    steps: History = field(default_factory=History)  # per second

    def push(self, stats: Stats, before: Stats | None) -> Histories:
        """Add the numbers of one event."""
        engine, ran = stats.engine, stats.steps
        earlier = before.engine if before is not None else engine
        looked_up = engine.prefix_queries_total - earlier.prefix_queries_total
        hits = engine.prefix_hits_total - earlier.prefix_hits_total
        seconds = stats.time - before.time if before is not None else 0.0
        steps = max(0, engine.steps_total - earlier.steps_total)
        return Histories(
            prompt_rate=self.prompt_rate.push(stats.prompt_tokens_per_second),
            generation_rate=self.generation_rate.push(stats.generation_tokens_per_second),
            first_token=self.first_token.push(stats.time_to_first_token.p50),
            inter_token=self.inter_token.push(stats.inter_token_latency.p50),
            inter_token_p99=self.inter_token_p99.push(stats.inter_token_latency.p99),
            kv_usage=self.kv_usage.push(engine.kv_usage),
            prefill_rows=self.prefill_rows.push(_mean(step.prefill_tokens for step in ran)),
            decode_rows=self.decode_rows.push(_mean(step.decode_tokens for step in ran)),
            waiting=self.waiting.push(stats.requests_waiting),
            # A new engine restarts the counters; without lookups there is no new value.
            hit_rate=self.hit_rate.push(
                hits / looked_up if looked_up > 0 <= hits else self.hit_rate.latest
            ),
            steps=self.steps.push(steps / seconds if seconds > 0 else 0.0),
        )


def _mean(values: Iterable[int]) -> float:
    """Return the mean over a second's steps; 0 if it had none."""
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DashboardState:
    """Everything shown; None until the server sends it."""

    connection: ConnectionChange = ConnectionChange(ConnectionPhase.CONNECTING)
    info: Info | None = None
    blocks: Blocks | None = None
    stats: Stats | None = None
    sequences: tuple[SequenceView, ...] = ()  # running ones first, oldest first
    history: Histories = field(default_factory=Histories)
    log: tuple[LogLine, ...] = ()  # oldest first, at most `MAX_LOG_LINES`
    jobs: tuple[Job, ...] = ()  # unfinished, in the order of their first event
    table: BlockTable | None = None  # of the most recently focused sequence

    @property
    def current(self) -> bool:
        """True if the map shows the engine's current state."""
        ready = self.info is None or self.info.state == "ready"
        return self.connection.phase is ConnectionPhase.LIVE and ready


def reduce(state: DashboardState, item: FeedItem, now: float = 0.0) -> DashboardState:
    """Return the state after one more item of the feed.

    `now` is on the clock that counts the ages of blocks.

    Raises:
        ValueError: the item contradicts itself or the map it changes.
    """
    match item:
        case ConnectionChange():
            # Each connection sends the whole log and the unfinished jobs again.
            if item.phase is ConnectionPhase.LIVE:
                state = replace(state, log=(), jobs=())
            return replace(state, connection=item)
        case Info():
            return replace(state, info=item)
        case Snapshot():
            return replace(state, blocks=_map_of(item, state.blocks, now))
        case Delta():
            if state.blocks is None or state.blocks.epoch != item.epoch:
                return state
            return replace(state, blocks=state.blocks.after(item, now))
        case Stats():
            return replace(state, stats=item, history=state.history.push(item, state.stats))
        case Sequences():
            return replace(state, sequences=_in_order(item.sequences))
        case Log():
            return replace(state, log=(*state.log, *item.lines)[-MAX_LOG_LINES:])
        case Job():
            return replace(state, jobs=_with_job(state.jobs, item))
        case BlockTable():
            return replace(state, table=item)


def _with_job(jobs: tuple[Job, ...], job: Job) -> tuple[Job, ...]:
    """Replace or add a job; remove it if it has ended."""
    if job.ended:
        return tuple(one for one in jobs if one.name != job.name)
    if all(one.name != job.name for one in jobs):
        return (*jobs, job)
    return tuple(job if one.name == job.name else one for one in jobs)


def _map_of(snapshot: Snapshot, before: Blocks | None, now: float) -> Blocks:
    """Build a snapshot's map; if it has no ages, unchanged blocks keep theirs."""
    blocks = Blocks.of(snapshot, now)
    if snapshot.ages or before is None or before.num_blocks != blocks.num_blocks:
        return blocks
    return blocks.aged_like(before)


def is_running(sequence: SequenceView) -> bool:
    """Return True if the sequence runs: only then is its slot valid."""
    return sequence.status == "running"


def _in_order(sequences: tuple[SequenceView, ...]) -> tuple[SequenceView, ...]:
    return tuple(
        sorted(
            sequences,
            key=lambda one: (not is_running(one), -one.age_seconds, one.request_id, one.index),
        )
    )
