"""Several engine processes of one model that look like one to the server.

A request stays with the replica that the router chooses. If that process dies, requests that it had
not started, and restarted ones, go to another. Replicas sleep, wake and restart independently; a
sleeping one wakes when those awake have more than the router's bound.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain, count, zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.engine.process.client import EngineClient, Replica
from appliance.engine.process.generation import OpenRequests
from appliance.engine.process.quarantine import Quarantine, mark_of
from appliance.engine.process.router import ReplicaLoad, ReplicaRouter, prompt_hashes
from appliance.engine.process.supervisor import EngineState, Wakes
from appliance.errors import EngineUnavailableError, MemoryPlanError
from appliance.long_lived import tell
from appliance.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from appliance.config import EngineConfig
    from appliance.engine.nouns.messages import EngineInfo, StepReport, Table, Vocabulary
    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.engine.process.generation import Generation
    from appliance.engine.process.residency import Resident
    from appliance.engine.process.supervisor import AskEndTokens, ProgressCallback


# Not summed: sizes of one block or state, values of the last step, and the shared folder on disk.
_LARGEST = frozenset(
    {
        "block_size",
        "state_bytes",
        "step_seconds",
        "model_seconds",
        "kv_disk_writing",
        "kv_disk_blocks",
        "kv_disk_bytes",
        "kv_disk_capacity_bytes",
    }
)
# The common state is the first of these that a replica has.
_BEST_FIRST = (
    EngineState.READY,
    EngineState.WAKING,
    EngineState.ASLEEP,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.FAILED,
    EngineState.STOPPED,
)


class ReplicaSet(OpenRequests):
    """The engine processes of one model and their router; same interface as `EngineClient`.

    Args:
        gpus: each replica's own GPU; empty for replicas that share the host's memory.
        make: makes a replica's client from its number and the shared state.
    """

    def __init__(self, gpus: Sequence[str], make: Callable[[int, Replica], EngineClient]) -> None:
        self.observers: list[Callable[[StepReport], None]] = []  # called for reports with stats
        quarantine, number = Quarantine(mark_of), len(gpus)
        self._gpus = gpus
        self.replicas: tuple[EngineClient, ...] = tuple(
            make(
                place,
                Replica(
                    copies=1 if gpu else number,
                    gpu=gpu,
                    quarantine=quarantine,
                    hand_over=partial(self._hand_over, place),
                ),
            )
            for place, gpu in enumerate(gpus)
        )
        for replica in self.replicas:
            replica.observers.append(self._pass_on)
        self.config = self.replicas[0].config
        self.adapters = _ReplicaAdapterCalls(self.replicas)
        self._quarantine = quarantine
        self._choice = _ReplicaChoice(self.replicas)
        self._step_numbers = count(1)

    def _open(self) -> Iterable[Generation]:
        return chain.from_iterable(replica._open() for replica in self.replicas)

    def replica_of(self, request_id: str) -> EngineClient:
        """Return the replica with a request; the first one if it is not open."""
        found = (one for one in self.replicas if one.owner_of(request_id) is not None)
        return next(found, self.replicas[0])

    @property
    def state(self) -> EngineState:
        """The state of the most capable replica."""
        states = {replica.state for replica in self.replicas}
        return next(state for state in _BEST_FIRST if state in states)

    @property
    def reason(self) -> str:
        """The cause, if a replica failed or is restarting."""
        return next((one.reason for one in self.replicas if one.reason), "")

    @property
    def responsive(self) -> bool:
        """True if a ready replica shows signs of life."""
        return any(one.responsive for one in self.replicas if one.state is EngineState.READY)

    @property
    def seconds_to_start(self) -> float:
        """Seconds until the next process starts; 0 if none is due."""
        due = [one.seconds_to_start for one in self.replicas if one.seconds_to_start]
        return min(due, default=0.0)

    @property
    def restarts(self) -> int:
        """Number of processes started after each replica's first."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def wakes(self) -> Wakes:
        """Number of wakes, and the longest of the replicas' last ones in seconds."""
        wakes = [replica.wakes for replica in self.replicas]
        return Wakes(sum(one.number for one in wakes), max(one.seconds for one in wakes))

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the replica with the smallest cache, which bounds requests."""
        known = [replica.info for replica in self.replicas if replica.info is not None]
        return min(known, key=lambda info: info.num_blocks, default=None)

    @property
    def stats(self) -> EngineStats:
        return _merged_stats([replica.stats for replica in self.replicas])

    @property
    def stats_time(self) -> float:
        return max(replica.stats_time for replica in self.replicas)

    @property
    def quarantined(self) -> int:
        """Number of refused requests that killed engines."""
        return len(self._quarantine)

    @property
    def place(self) -> Resident:
        """The most recently used replica's place in memory."""
        return max((one.place for one in self.replicas), key=lambda place: place.last_used)

    def lack(self, reason: str) -> None:
        """Note why there is no model to load yet."""
        for replica in self.replicas:
            replica.lack(reason)

    def configure(self, config: EngineConfig) -> None:
        """Replace the settings before the first start; each replica keeps its threads."""
        for replica in self.replicas:
            replica.configure(msgspec.structs.replace(config, threads=replica.config.threads))
        self.config = self.replicas[0].config

    async def prepare(self) -> None:
        await asyncio.gather(*(replica.prepare() for replica in self.replicas))

    async def start(self, end_tokens: AskEndTokens, on_progress: ProgressCallback) -> EngineInfo:
        """Load the model in all processes.

        Raises:
            ApplianceError: one failed; the others are closed.
        """
        loading = [
            asyncio.create_task(
                replica.start(end_tokens, on_progress if place == 0 else _say_nothing),
                name="replica-loading",
            )
            for place, replica in enumerate(self.replicas)
        ]
        try:
            await asyncio.gather(*loading)
        except BaseException as error:
            for task in loading:
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)
            await asyncio.gather(*(replica.close(now=True) for replica in self.replicas))
            if isinstance(error, MemoryPlanError) and not self._gpus[0]:
                count = len(self.replicas)
                raise MemoryPlanError(
                    f"{error}; --replicas {count} divides the memory by {count}, so that fewer"
                    " have more each"
                ) from error
            raise
        assert self.info is not None
        return self.info

    async def ready(self) -> None:
        """Wait until a replica accepts requests.

        Raises:
            EngineUnavailableError: none will be ready soon.
        """
        if self.state.accepts:
            return
        waiting = {asyncio.ensure_future(replica.ready()) for replica in self.replicas}
        error: BaseException | None = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.exception() for task in done]
                if None in errors:
                    return
                error = error or errors[0]
        finally:
            for task in waiting:
                task.cancel()
        assert error is not None
        raise error

    async def close(self, *, now: bool = False) -> None:
        """End all processes; open requests fail."""
        await asyncio.gather(*(replica.close(now=now) for replica in self.replicas))

    def generate(self, request: Request) -> Generation:
        """Submit a request to the best replica.

        Raises:
            EngineUnavailableError: no replica accepts requests.
            QuarantinedError: engines died of this request.
        """
        chosen = self._choice.choose(request)
        if chosen is None:
            raise EngineUnavailableError(
                f"the engine is {self.state.value}", retry_after=self.seconds_to_start or None
            )
        return chosen.generate(request)

    def _hand_over(self, place: int, generation: Generation) -> bool:
        chosen = self._choice.choose(generation.request, but=place)
        if chosen is None:
            return False
        chosen.adopt(generation)
        return True

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the model's tokens, so that the engines can prepare for grammars."""
        for replica in self.replicas:
            replica.learn(vocabulary)

    def cancel(self, request_id: str) -> bool:
        """End a request for an administrator; return False if it is not open."""
        return self.replica_of(request_id).cancel(request_id)

    async def fetch_table(self, request_id: str, index: int) -> Table:
        """Fetch one sequence's block table, as between two steps."""
        return await self.replica_of(request_id).fetch_table(request_id, index)

    def fail_all(self, error: Exception) -> None:
        for replica in self.replicas:
            replica.fail_all(error)

    def _pass_on(self, report: StepReport) -> None:
        """Pass a report to observers, with steps numbered consecutively."""
        steps = tuple(
            msgspec.structs.replace(step, number=next(self._step_numbers)) for step in report.steps
        )
        report = msgspec.structs.replace(report, steps=steps)
        tell(self.observers, report)


class _ReplicaChoice:
    """The router, and its facts about each replica's process."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas
        self._router = ReplicaRouter[int]()
        for place in range(len(replicas)):
            self._router.begin(place, 0)
        self._block_size = 0
        self._pids: list[int | None] = [None] * len(replicas)  # known to the router

    def choose(self, request: Request, but: int | None = None) -> EngineClient | None:
        """Return the best replica for a request; None if none accepts it.

        Args:
            but: number of an excluded replica.
        """
        able = [
            place != but and replica.state.accepts for place, replica in enumerate(self._replicas)
        ]
        if not any(able):
            return None
        awake = [replica.state is EngineState.READY for replica in self._replicas]
        # One that is silent unusually long gets nothing while another is there.
        alive = [
            one and (replica.responsive or replica.state is not EngineState.READY)
            for one, replica in zip(able, self._replicas, strict=True)
        ]
        able = alive if any(alive) else able
        self._tell_router()
        loads = {
            place: ReplicaLoad(replica.num_sequences, awake[place])
            for place, replica in enumerate(self._replicas)
            if able[place]
        }
        hashes = prompt_hashes(request, self._block_size) if self._router.uses_hashes else []
        return self._replicas[self._router.route(hashes, loads)]

    def _tell_router(self) -> None:
        """Reset the router's records of ended processes."""
        for place, replica in enumerate(self._replicas):
            if replica.info is not None and replica.pid != self._pids[place]:
                self._pids[place] = replica.pid
                info = replica.info
                blocks = info.num_blocks if replica.config.prefix_caching else 0
                # Host memory keeps evicted blocks of the same size.
                blocks += blocks * info.kv_host_bytes // max(1, info.kv_bytes)
                self._router.begin(place, blocks)
                self._block_size = info.block_size


class _ReplicaAdapterCalls:
    """An administrator's adapter requests, for all replicas; see `AdapterCalls`."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas

    async def load(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; sleeping replicas read it then.

        Raises:
            RequestError: the adapter is unusable.
        """
        awake = [one for one in self._replicas if one.state is EngineState.READY]
        awake = awake or [self._replicas[0]]
        answers = [one.adapters.load(ref) for one in awake]
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    def unload(self, ref: AdapterRef) -> None:
        """Forget an adapter after the last request that uses it."""
        for replica in self._replicas:
            replica.adapters.unload(ref)


def _merged_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    merged: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(stats, name) for stats in all_stats]
        if name in _LARGEST:
            merged[name] = max(values)
        elif isinstance(values[0], tuple):
            merged[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            merged[name] = sum(values)
    return EngineStats(**merged)


def _say_nothing(stage: str, done: int, total: int) -> None:
    """Ignore progress: all replicas load the same, so one's is enough."""


ServedEngine = EngineClient | ReplicaSet  # of one model
