"""The feed of one dashboard: events of `appliance.events`.

It costs the engine nothing, and this process only while someone watches.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.engine.nouns.messages import EngineInfo
from appliance.events import (
    PROTOCOL,
    Info,
    Log,
    ModelView,
    ReplicaView,
    Sequences,
    Stats,
    encode_event,
)
from appliance.progress.jobs import read_jobs
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.process.client import EngineClient
    from appliance.events import Event, Job
    from appliance.log import RecentWarnings
    from appliance.server.dashboard.block_feed import BlockFeed
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState
    from appliance.stats import EngineStats, SequenceView, StepView

TICK_SECONDS = 0.2
STATS_SECONDS = 1.0
MAX_STEPS_SHOWN = 256  # of the steps since the last stats event
RATE_SECONDS = 1.0  # smoothing window of a rate
SHOWN_TOKENS = 400  # of a prompt, if the server shows prompts
Key = tuple[str, int]


class Watcher:
    """The feed of one dashboard: changes only, of one model at a time.

    Of a model with several replicas it shows one's blocks and sequences, and everyone's numbers.

    Args:
        holder: name of its API key.
        replica: number of the replica to show; the last one if there are fewer.
    """

    def __init__(
        self, server: ServerState, blocks: BlockFeed, holder: str, replica: int = 0
    ) -> None:
        self._server = server
        self._state = server.shown()
        self._blocks = blocks
        self._holder = holder
        self._replica = replica
        self._info: Info | None = None
        self._sequences = SequenceFeed(self._state, self._engine, holder)
        self._log = LogFeed(server.warnings)
        self._jobs: dict[str, Job] = {}
        self._next_stats = 0.0
        self._rates = TokenRates()
        self._last_step: int | None = None

    @property
    def _engine(self) -> EngineClient:
        return shown_replica(self._state, self._replica)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames while the server runs; a slow reader gets fewer frames, never stale ones."""
        while not self._server.closing:
            if time.monotonic() >= self._next_stats:
                await self._server.machine.read()
            events = self.poll()
            if events:
                yield b"".join(map(encode_event, events))
            await asyncio.sleep(TICK_SECONDS)

    def poll(self) -> list[Event]:
        self._look_at(self._server.shown(self._state))
        engine = self._engine
        events: list[Event] = []
        info = server_info(self._state, self._replica)
        if info != self._info:
            self._info = info
            events.append(info)
        metadata = engine.metadata
        if metadata is not None and engine.info is not None and info.state == "ready":
            change = self._blocks.poll(metadata, engine.info)
            events += [] if change is None else [change]
        events += [event for event in (self._sequences.poll(), self._log.poll()) if event]
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            events += [*self._new_jobs(), self._stats()]
        return events

    def _look_at(self, model: ModelState) -> None:
        """Switch to a model; the block map detects a new engine by itself."""
        if model is not self._state:
            self._state, self._last_step = model, None
            self._sequences = SequenceFeed(model, self._engine, self._holder)
            self._rates = TokenRates()

    def _new_jobs(self) -> list[Job]:
        """Return the jobs with progress; a lost one counts as ended."""
        folder = self._server.jobs_folder
        before, self._jobs = self._jobs, {} if folder is None else read_jobs(folder)
        ended = [job for file, job in before.items() if file not in self._jobs]
        changed = [job for file, job in self._jobs.items() if job != before.get(file)]
        return [msgspec.structs.replace(job, ended=True) for job in ended] + changed

    def _stats(self) -> Stats:
        engine, metrics = self._state.engine, self._state.metrics
        prompt_rate, generation_rate = self._rates.update(engine.stats, engine.stats_time)
        now = time.time()
        return Stats(
            time=now,
            uptime_seconds=now - self._server.started,
            engine=engine.stats,
            requests_running=engine.num_running,
            requests_waiting=engine.num_waiting,
            requests_finished=metrics.finished,
            requests_failed=metrics.failed,
            prompt_tokens_per_second=prompt_rate,
            generation_tokens_per_second=generation_rate,
            time_to_first_token=metrics.time_to_first_token.quantiles(),
            inter_token_latency=metrics.inter_token_latency.quantiles(),
            end_to_end=metrics.end_to_end.quantiles(),
            queue_wait=metrics.queue_wait.quantiles(),
            machine=self._server.machine.latest,
            steps=self._new_steps(),
            replicas=replica_views(self._state),
        )

    def _new_steps(self) -> tuple[StepView, ...]:
        """Return this engine's steps since the last call."""
        recent = self._state.metrics.recent_steps
        latest = recent[-1].number if recent else 0
        last, self._last_step = self._last_step, latest
        if last is None or latest < last:
            return ()
        return tuple(step for step in recent if step.number > last)[-MAX_STEPS_SHOWN:]


class LogFeed:
    """Log lines that a watcher has not seen yet."""

    def __init__(self, warnings: RecentWarnings) -> None:
        self._warnings = warnings
        self._told = 0

    def poll(self) -> Log | None:
        """Return the kept lines since the last call."""
        new, self._told = self._warnings.total - self._told, self._warnings.total
        lines = tuple(self._warnings.lines)
        return Log(lines=lines[max(0, len(lines) - new) :]) if new else None


class SequenceFeed:
    """The changes of sequences for one watcher.

    Args:
        holder: name of the watcher's key; it sees no other key's prompts.
    """

    def __init__(self, state: ModelState, engine: EngineClient, holder: str) -> None:
        self._state = state
        self._engine = engine
        self._holder = holder
        self._known: tuple[SequenceView, ...] | None = None
        self._rates: dict[Key, SequenceRate] = {}
        self._prompts: dict[str, str] = {}

    def poll(self) -> Sequences | None:
        """Return all sequences if the engine has reported since the last call."""
        engine = self._engine
        if engine.sequences is self._known:
            return None
        self._known = engine.sequences
        live = {(view.request_id, view.index) for view in engine.sequences}
        self._rates = {key: self._rates.get(key) or SequenceRate() for key in live}
        self._read_prompts()
        return Sequences(sequences=tuple(map(self._complete, engine.sequences)))

    def _complete(self, view: SequenceView) -> SequenceView:
        rate = self._rates[view.request_id, view.index]
        return msgspec.structs.replace(
            view,
            model=self._state.model_id,
            prompt=self._prompts.get(view.request_id, ""),
            yours=self._state.server.may_manage(self._holder, view.owner),
            tokens_per_second=rate.update(self._engine.stats_time, view.output_tokens),
        )

    def _read_prompts(self) -> None:
        tokenizer = self._state.tokenizer
        if not self._state.config.show_prompts or tokenizer is None:
            return
        before, self._prompts = self._prompts, {}
        for request, _ in self._engine.open_requests():
            if not self._state.server.may_manage(self._holder, request.owner):
                continue
            known = before.get(request.request_id)
            if known is None:
                known = tokenizer.decode(request.prompt_token_ids[:SHOWN_TOKENS])
            self._prompts[request.request_id] = known


class SequenceRate:
    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        self._rate = 0.0

    def update(self, now: float, tokens: int) -> float:
        """Return the smoothed rate after `tokens` tokens at a monotonic time."""
        before, self._before = self._before, (now, tokens)
        if before is None or now <= before[0]:
            return self._rate
        seconds = now - before[0]
        weight = 1.0 - math.exp(-seconds / RATE_SECONDS)
        latest = max(0, tokens - before[1]) / seconds
        self._rate = latest if self._rate == 0.0 else self._rate + weight * (latest - self._rate)
        return self._rate


class TokenRates:
    """Tokens per second between two reports."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None

    def update(self, stats: EngineStats, when: float) -> tuple[float, float]:
        """Return the rates of prompt and generated tokens since the last call, or 0.

        Args:
            when: monotonic time of the report.
        """
        now = (when, stats.prompt_tokens_total, stats.generation_tokens_total)
        before, self._before = self._before, now
        if before is None or when <= before[0]:
            return 0.0, 0.0
        seconds = when - before[0]
        # A new engine's counters start at 0.
        return max(0, now[1] - before[1]) / seconds, max(0, now[2] - before[2]) / seconds


def shown_replica(state: ModelState, replica: int) -> EngineClient:
    """Return a model's replica by number; the last one if there are fewer."""
    replicas = state.engine.replicas
    return replicas[min(replica, len(replicas) - 1)]


def replica_views(state: ModelState) -> tuple[ReplicaView, ...]:
    """Describe a model's replicas; empty for a single process."""
    replicas = state.engine.replicas
    if len(replicas) == 1:
        return ()
    return tuple(
        ReplicaView(
            state=one.state.value,
            restarts=one.restarts,
            requests_running=one.num_running,
            requests_waiting=one.num_waiting,
            kv_usage=one.stats.kv_usage,
            prefix_hit_rate=one.stats.prefix_hit_rate,
        )
        for one in replicas
    )


def server_info(state: ModelState, replica: int = 0) -> Info:
    """Describe the server and, once loaded, the model as one replica has it."""
    engine = shown_replica(state, replica)
    facts: dict[str, Any] = {}
    if engine.info is not None:
        shared = set(Info.__struct_fields__) & set(EngineInfo.__struct_fields__)
        facts = {name: getattr(engine.info, name) for name in shared}
        facts["precisions"] = engine.info.precisions or (engine.info.kv_format,)
    if state.tokenizer is not None:
        facts["notes"] = (*facts.get("notes", ()), *state.tokenizer.notes)
    facts |= {
        "protocol": PROTOCOL,
        "version": __version__,
        "model": state.model_id,
        "replica": state.engine.replicas.index(engine),
        "state": engine.state.value,
        "reason": engine.reason,
        "restarts": engine.restarts,
        "quality": state.quality_facts,
        "chats": state.tokenizer is None or state.tokenizer.chat_template is not None,
        "sampling": dict(state.sampling.values),
        "prompts_shown": state.config.show_prompts,
    }
    if len(state.server.models) > 1:
        facts["models"] = tuple(
            ModelView(name=one.model_id, state=one.engine.state.value)
            for one in state.server.models
        )
    return Info(**facts)
