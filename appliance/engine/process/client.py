"""The API process's view of the engine: requests in, deltas out, across restarts.

When a process dies, its running requests end with an error and waiting ones go to the next process.
The client remembers the requests that were running: repeated ones run one at a time, so that a
request that kills engines fails no other (see `quarantine`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from appliance import log
from appliance.engine.nouns.beacon import name_of
from appliance.engine.nouns.messages import (
    Abort,
    FetchTable,
    Load,
    StepReport,
    Submit,
    Table,
    Vocabulary,
)
from appliance.engine.process.answers import AdapterCalls, ReadyWaiters, TableFetches
from appliance.engine.process.generation import MAX_BACKLOG, Generation, OpenRequests
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.quarantine import Quarantine, Trials, mark_of
from appliance.engine.process.residency import IdleTimer, Residency, Resident
from appliance.engine.process.supervisor import SHORT, EngineState, Supervisor
from appliance.errors import (
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    RequestAbortedError,
)
from appliance.long_lived import tell
from appliance.stats import EngineStats, SequenceView

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.request import Request
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.engine.process.supervisor import (
        AskEndTokens,
        ProgressCallback,
        SupervisionLimits,
        Wakes,
    )


# Number of processes that a waiting request may go to. A higher one would let a request that kills
# the engine before it starts take the server down.
MAX_SUBMISSIONS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a model; by default the only one.

    Attributes:
        copies: number of processes that divide the same memory.
        gpu: index or id of its own GPU; empty if it sees all.
        quarantine: shared by all, because a request that kills one kills the next.
        hand_over: offers a request that it has not started to the others; False if none takes it.
    """

    copies: int = 1
    gpu: str = ""
    quarantine: Quarantine[Request] = field(default_factory=lambda: Quarantine(mark_of))
    hand_over: Callable[[Generation], bool] = lambda generation: False


class EngineClient(OpenRequests):
    """The engine process and the open requests.

    Args:
        command: starts the process; tests replace it.
        launched: the first process, if already started.
        idle_timeout: seconds without a request before the process ends; 0 keeps it.
        residency: grants memory; None takes what is free.
        replica: state shared with other processes of the model.
        on_lost: called when the process cannot be supervised any more, after its requests failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: SupervisionLimits | None = None,
        launched: LaunchedProcess | None = None,
        idle_timeout: float = 0.0,
        residency: Residency | None = None,
        name: str = "the model",
        replica: Replica | None = None,
        on_lost: Callable[[Exception | None], object] = lambda error: None,
    ) -> None:
        self.stats = EngineStats()  # of the last report
        self.stats_time = 0.0  # monotonic arrival time
        self.sequences: tuple[SequenceView, ...] = ()
        self.observers: list[Callable[[StepReport], None]] = []  # called for reports with stats
        self.vocabulary: Vocabulary | None = None  # set it before the first grammar
        self.config = config  # the engine's settings
        self._informed: int | None = None  # pid of the process that has the vocabulary
        self._generations: dict[str, Generation] = {}
        replica = replica or Replica()
        self._hand_over = replica.hand_over
        self.quarantine = replica.quarantine
        self.trials = Trials()
        self._waiters = ReadyWaiters()
        self.place = Resident(residency or Residency(), name, self, replica.copies)
        self._gpu = replica.gpu
        self.supervisor = Supervisor(
            command,
            limits,
            on_report=self.on_report,
            on_death=self.on_death,
            on_ready=self._on_ready,
            on_outage=self._on_outage,
            on_asleep=self._on_asleep,
            on_planned=self.place.take,
            on_lost=on_lost,
            is_busy=self.is_busy,
            launched=launched,
        )
        self.tables = TableFetches(lambda *asked: self.supervisor.send(FetchTable(*asked)))
        self._idle = IdleTimer(idle_timeout, self.supervisor.sleep)
        self.adapters = AdapterCalls(self.supervisor)

    @property
    def state(self) -> EngineState:
        return self.supervisor.state

    @property
    def reason(self) -> str:
        """The cause, if the engine failed or is restarting."""
        return self.supervisor.reason

    @property
    def responsive(self) -> bool:
        """True if a ready process shows signs of life."""
        return self.supervisor.responsive

    @property
    def seconds_to_start(self) -> float:
        """Seconds until the next process starts; 0 if none is due."""
        return self.supervisor.seconds_to_start

    @property
    def restarts(self) -> int:
        """Number of processes started after the first."""
        return self.supervisor.restarts

    @property
    def wakes(self) -> Wakes:
        return self.supervisor.wakes

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the loaded engine; the last known ones while it restarts or sleeps."""
        return self.supervisor.info

    @property
    def pid(self) -> int | None:
        process = self.supervisor.process
        return None if process is None else process.pid

    @property
    def metadata(self) -> memoryview | None:
        """(num_blocks,) 64-bit words of block metadata, live."""
        process, info = self.supervisor.process, self.supervisor.info
        return None if process is None or info is None else process.metadata[: info.num_blocks]

    @property
    def quarantined(self) -> int:
        """Number of refused requests that killed engines."""
        return len(self.quarantine)

    @property
    def is_wanted(self) -> bool:
        """True if it is loading or has open requests."""
        return self.state is not EngineState.READY or bool(self._generations)

    @property
    def replicas(self) -> tuple[EngineClient, ...]:
        """Itself; see `ReplicaSet`."""
        return (self,)

    def replica_of(self, request_id: str) -> EngineClient:
        """Return itself; see `ReplicaSet`."""
        return self

    def _open(self) -> Iterable[Generation]:
        return self._generations.values()

    def lack(self, reason: str) -> None:
        """Note why there is no model to load yet."""
        self.supervisor.lack(reason)

    def configure(self, config: EngineConfig) -> None:
        """Replace the settings before the first start."""
        self.config = config

    async def prepare(self) -> None:
        """Start the process before `start`: it imports while the caller reads the tokenizer."""
        await self.supervisor.prepare()

    async def start(self, end_tokens: AskEndTokens, on_progress: ProgressCallback) -> EngineInfo:
        """Load the model.

        Args:
            end_tokens: returns the tokens that end an answer; called once the weights are read.
            on_progress: called with stage, done, total.

        Raises:
            ApplianceError: loading failed; the class has the exit code.
        """
        make_load = partial(Load, self.config, self._gpu)
        try:
            info = await self.supervisor.start(
                lambda: make_load(*self.place.terms, *log.configured()), end_tokens, on_progress
            )
        except BaseException:
            self.place.leave()
            raise
        self._rest()
        return info

    def sleep(self) -> None:
        """End the process now unless it has work; the next request starts another."""
        self.supervisor.sleep()

    async def ready(self) -> None:
        """Wait until the engine accepts requests; a sleeping one does.

        Raises:
            EngineUnavailableError: it will not be ready soon.
        """
        if self.state.accepts:
            return
        if self.state is not EngineState.RESTARTING or self.seconds_to_start > SHORT:
            raise EngineUnavailableError(
                f"the engine is {self.state.value}", retry_after=self.seconds_to_start or None
            )
        await self._waiters.wait()

    async def close(self, *, now: bool = False) -> None:
        """End the engine after its step, or immediately with `now`; open requests fail."""
        error = EngineUnavailableError("the server is shutting down")
        self._idle.stop()
        self.fail_all(error)
        self._waiters.wake(error)
        self._forget_sequences()
        self.adapters.forget()
        await self.supervisor.close(now=now)

    def generate(self, request: Request) -> Generation:
        """Submit a request, waking the engine if necessary; iterate over the result for deltas.

        Raises:
            EngineUnavailableError: the engine is neither ready nor asleep.
            QuarantinedError: engines died of this request.
        """
        if not self.state.accepts:
            raise EngineUnavailableError(
                f"the engine is {self.state.value}", retry_after=self.seconds_to_start or None
            )
        assert request.request_id not in self._generations
        generation = Generation(self, request)
        generation.is_suspect = self.quarantine.is_suspect(request)
        self._take(generation)
        return generation

    def adopt(self, generation: Generation) -> None:
        """Take over a request that another engine has not started."""
        generation.move(self)
        self._take(generation)

    def _take(self, generation: Generation) -> None:
        self._generations[generation.request.request_id] = generation
        try:
            self._idle.stop()
            self.place.use()
            if self.state is EngineState.READY and not self.place.is_leaving:
                generation.submissions += 1
                self._submit(generation)
            else:
                self.supervisor.wake()
        except BaseException:
            generation.close()  # nobody else can
            raise

    def _submit(self, generation: Generation) -> None:
        """Send a request to the engine; hold a suspect while another is on trial."""
        if not self.trials.admits(generation):
            return
        if generation.request.sampling.grammar is not None:
            assert self.vocabulary is not None, "a grammar without a vocabulary"
            self._inform()
        self.supervisor.send(Submit(generation.request))

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the model's tokens, so that the engine can prepare for grammars."""
        self.vocabulary = vocabulary
        if self.state is EngineState.READY:
            self._inform()

    def _inform(self) -> None:
        if self.vocabulary is not None and self.pid != self._informed:
            self.supervisor.send(self.vocabulary)
            self._informed = self.pid

    def _end_trial(self, generation: Generation) -> None:
        """End a suspect's trial at its first tokens or its end, and start the next one's."""
        following = self.trials.end(generation, self._is_open)
        if following is not None:
            self._submit(following)

    def _is_open(self, generation: Generation) -> bool:
        return self._generations.get(generation.request.request_id) is generation

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it, in any phase."""
        self.supervisor.send(Abort(request_id, index))

    def cancel(self, request_id: str) -> bool:
        """End a request for an administrator; return False if it is not open."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        self._end(generation, RequestAbortedError("whoever runs this server ended the request"))
        self.abort(request_id)
        return True

    async def fetch_table(self, request_id: str, index: int) -> Table:
        """Fetch one sequence's block table, as between two steps."""
        if self.state is not EngineState.READY or request_id not in self._generations:
            return Table(request_id=request_id, index=index)
        return await self.tables.fetch(request_id, index)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error; their consumers close them."""
        for generation in list(self._generations.values()):
            self._end(generation, error)

    def _end(self, generation: Generation, error: Exception) -> None:
        del self._generations[generation.request.request_id]
        generation.fail(error)
        self._end_trial(generation)
        self._rest()

    def forget(self, generation: Generation, *, complete: bool) -> None:
        """Drop a request that its consumer has closed, and stop the engine's work on it."""
        if not self._is_open(generation):
            return
        del self._generations[generation.request.request_id]
        if complete:
            self.quarantine.absolve(generation.request)
        else:
            self.abort(generation.request.request_id)
        self._end_trial(generation)
        self._rest()

    def _rest(self) -> None:
        """Start the idle timer when the last request has ended."""
        if not self._generations:
            self.place.use()
            self._idle.start()
        self.place.leave_if_asked()

    def is_busy(self) -> bool:
        """Return True if the engine owes tokens or an adapter's answer.

        Does not count requests that it has not got, or unread deltas.
        """
        return self.adapters.is_asked or any(
            one.is_awaited and one.submissions > 0 and one not in self.trials
            for one in self._generations.values()
        )

    def on_report(self, report: StepReport) -> None:
        for request_id in report.started:
            if generation := self._generations.get(request_id):
                generation.started = True
        for delta in report.deltas:
            if generation := self._generations.get(delta.request_id):
                generation.put(delta)
                if delta.token_ids or delta.error is not None:
                    self._end_trial(generation)
                if generation.backlog > MAX_BACKLOG:
                    self._end(generation, EngineError("the answer is read too slowly"))
                    self.abort(delta.request_id)
        if report.stats is not None:
            self.stats = report.stats
            self.stats_time = time.monotonic()
        if report.sequences is not None:
            self.sequences = report.sequences
        for table in report.tables:
            self.tables.answer(table)
        if report.adapters:
            self.adapters.take(report.adapters)
            self._rest()
        if report.stats is not None:
            tell(self.observers, report)  # one that fails is no reason to end requests
        self.place.leave_if_asked()

    def _forget_sequences(self) -> None:
        self.sequences = ()
        self.tables.give_up()

    def on_death(self, error: EngineDiedError) -> None:
        self.place.leave()
        self._forget_sequences()
        self.adapters.forget()
        held = self.trials.abandon()
        process = self.supervisor.process
        starting = set() if process is None else process.beacon.started()
        # The engine was running some of its requests; the others waited.
        given = [one for one in self._generations.values() if one not in held and one.is_awaited]
        lost = {
            one.request.request_id: one
            for one in given
            if one.started or name_of(one.request.request_id) in starting
        }
        if error.by_itself and lost:
            logger.warning("the engine died while it worked on %s", ", ".join(lost))
            self.quarantine.strike(one.request for one in lost.values())
        for generation in given:
            if generation.request.request_id in lost or generation.submissions >= MAX_SUBMISSIONS:
                self._end(generation, error)
        self._hand_over_waiting()

    def _hand_over_waiting(self) -> None:
        """Hand requests that no process has started to another replica, if one takes them."""
        for generation in list(self._generations.values()):
            if generation.is_awaited and not generation.started and self._hand_over(generation):
                del self._generations[generation.request.request_id]

    def _on_asleep(self) -> None:
        self.place.leave()
        self._forget_sequences()
        self.on_report(StepReport(stats=EngineStats()))  # a process without content
        if self.adapters.is_asked or any(one.is_awaited for one in self._generations.values()):
            self.supervisor.wake()

    def _on_ready(self) -> None:
        self.adapters.begin()
        for generation in list(self._generations.values()):
            if generation.is_awaited:  # otherwise its consumer just has to read the rest
                generation.submissions += 1
                self._submit(generation)
        self._waiters.wake()
        self._rest()

    def _on_outage(self, error: EngineUnavailableError) -> None:
        self.place.leave()
        self._forget_sequences()
        self.adapters.forget()
        self._hand_over_waiting()
        self.fail_all(error)
        self._waiters.wake(error)
