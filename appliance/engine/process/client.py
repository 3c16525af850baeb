"""Requests in, deltas out: the engine as the API process sees it, whichever process runs it.

When a process dies, requests that it had started end with an error and those that still waited
are given to the next one. Those that it died of are known, and come one by one if they come again,
so that the one that ends engines takes no other with it (see `quarantine`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from appliance.engine.beacon import name_of
from appliance.engine.messages import (
    Abort,
    FetchTable,
    Load,
    StepReport,
    Submit,
    Table,
    Vocabulary,
)
from appliance.engine.process.child import ENGINE_COMMAND
from appliance.engine.process.generation import MAX_BACKLOG, Generation
from appliance.engine.process.quarantine import Quarantine
from appliance.engine.process.supervisor import SHORT, EngineState, SupervisionLimits, Supervisor
from appliance.errors import (
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    RequestAbortedError,
)
from appliance.stats import EngineStats, SequenceView

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.engine.request import Request

# A request that waited is given to the next process this often. More would let one that kills the
# engine before it is even started take the server down with it.
MAX_SUBMISSIONS = 2

logger = logging.getLogger(__name__)


class EngineClient:
    """The engine process and the requests it has been given.

    Args:
        config: what to load.
        command: starts the process; tests put another engine here.
        limits: of the supervision.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: SupervisionLimits | None = None,
    ) -> None:
        self.stats = EngineStats()  # the latest
        self.stats_time = 0.0  # monotonic, when they came
        self.sequences: tuple[SequenceView, ...] = ()
        self.observers: list[Callable[[StepReport], None]] = []  # get every report with stats
        self.vocabulary: Vocabulary | None = None  # to be set before the first grammar
        self._config = config
        self._informed: int | None = None  # the process that has got the vocabulary
        self._generations: dict[str, Generation] = {}
        self._quarantine = Quarantine()
        self._on_trial: Generation | None = None  # the suspect that the engine was given
        self._held: deque[Generation] = deque()  # suspects whose turn comes after it
        self._tables: dict[tuple[str, int], asyncio.Future[Table]] = {}
        self._waiters: list[asyncio.Future[None]] = []  # until it is ready
        self._supervisor = Supervisor(
            command,
            limits,
            on_report=self._on_report,
            on_death=self._on_death,
            on_ready=self._on_ready,
            on_outage=self._on_outage,
            is_busy=self._is_busy,
        )

    @property
    def state(self) -> EngineState:
        """What the process is doing."""
        return self._supervisor.state

    @property
    def reason(self) -> str:
        """Why the engine is not ready, if it failed or restarts."""
        return self._supervisor.reason

    @property
    def responsive(self) -> bool:
        """Whether a process that is ready shows signs of life."""
        return self._supervisor.responsive

    @property
    def seconds_to_start(self) -> float:
        """Until another process is started; 0 if none is waited for."""
        return self._supervisor.seconds_to_start

    @property
    def quarantined(self) -> int:
        """Requests that are refused because engines died of them."""
        return len(self._quarantine)

    @property
    def restarts(self) -> int:
        """Processes started after the first."""
        return self._supervisor.restarts

    @property
    def info(self) -> EngineInfo | None:
        """What is loaded; the last known while the engine restarts."""
        return self._supervisor.info

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        process = self._supervisor.process
        return None if process is None else process.pid

    @property
    def metadata(self) -> memoryview | None:
        """(num_blocks,) 64-bit words of block metadata, live."""
        process, info = self._supervisor.process, self._supervisor.info
        return None if process is None or info is None else process.metadata[: info.num_blocks]

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not started."""
        return sum(not generation.started for generation in self._generations.values())

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts of these."""
        generations = self._generations.values()
        return sum(len(one.request.prompt_token_ids) for one in generations if not one.started)

    def num_waiting_of(self, owner: str) -> int:
        """Requests of one owner that the engine has not started."""
        generations = self._generations.values()
        return sum(not one.started and one.request.owner == owner for one in generations)

    @property
    def num_running(self) -> int:
        """Requests that the engine has started and not finished."""
        return sum(generation.started for generation in self._generations.values())

    @property
    def num_running_sequences(self) -> int:
        """Sequences of the requests that the engine has started."""
        generations = self._generations.values()
        return sum(one.request.sampling.num_sequences for one in generations if one.started)

    async def prepare(self) -> None:
        """Start the process ahead of `start`: it imports while the caller reads the tokenizer."""
        await self._supervisor.prepare()

    async def start(
        self, eos_token_ids: tuple[int, ...], on_progress: ProgressCallback
    ) -> EngineInfo:
        """Load the model.

        Raises:
            ApplianceError: it cannot be loaded; the class has the exit code.
        """
        return await self._supervisor.start(Load(self._config, eos_token_ids), on_progress)

    async def ready(self) -> None:
        """Wait until requests are accepted again.

        Raises:
            EngineUnavailableError: that will not be soon.
        """
        if self.state is EngineState.READY:
            return
        if self.state is not EngineState.RESTARTING or self.seconds_to_start > SHORT:
            raise EngineUnavailableError(
                f"the engine is {self.state.value}", retry_after=self.seconds_to_start or None
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self, error: EngineUnavailableError | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    async def close(self, *, now: bool = False) -> None:
        """End the engine after its step, or now; what is in flight fails."""
        error = EngineUnavailableError("the server is shutting down")
        self.fail_all(error)
        self._wake(error)
        self._forget_sequences()
        await self._supervisor.close(now=now)

    def generate(self, request: Request) -> Generation:
        """Submit a request at once; iterate for its deltas.

        Raises:
            EngineUnavailableError: the engine is not ready.
            QuarantinedError: engines died of this request.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(
                f"the engine is {self.state.value}", retry_after=self.seconds_to_start or None
            )
        assert request.request_id not in self._generations
        generation = Generation(self, request)
        generation.is_suspect = self._quarantine.is_suspect(request)
        self._generations[request.request_id] = generation
        self._submit(generation)
        return generation

    def _submit(self, generation: Generation) -> None:
        """Give a request to the engine; a suspect only when none is on trial."""
        if generation.is_suspect and self._on_trial is not None:
            self._held.append(generation)
            return
        if generation.is_suspect:
            self._on_trial = generation
        if generation.request.sampling.grammar is not None:
            assert self.vocabulary is not None, "a grammar without a vocabulary"
            self._inform()
        self._supervisor.send(Submit(generation.request))

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the model's tokens, so that the engine can prepare for grammars."""
        self.vocabulary = vocabulary
        if self.state is EngineState.READY:
            self._inform()

    def _inform(self) -> None:
        if self.vocabulary is not None and self.pid != self._informed:
            self._supervisor.send(self.vocabulary)
            self._informed = self.pid

    def _end_trial(self, generation: Generation) -> None:
        """A suspect has got its first tokens, or is over: the next one's turn."""
        if self._on_trial is not generation:
            return
        self._on_trial = None
        while self._held and self._on_trial is None:
            following = self._held.popleft()
            if self._generations.get(following.request.request_id) is following:
                self._submit(following)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it, in whatever phase it is."""
        self._supervisor.send(Abort(request_id, index))

    def cancel(self, request_id: str) -> bool:
        """End a request at the wish of whoever runs the server; False if it is not open."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        self._end(generation, RequestAbortedError("whoever runs this server ended the request"))
        self.abort(request_id)
        return True

    def owner_of(self, request_id: str) -> str | None:
        """Whose an open request is; None if it is not open."""
        generation = self._generations.get(request_id)
        return None if generation is None else generation.request.owner

    def open_requests(self) -> list[tuple[Request, bool]]:
        """Every request that is open here, and whether the engine has started it."""
        return [(one.request, one.started) for one in self._generations.values()]

    async def fetch_table(self, request_id: str, index: int) -> Table:
        """The blocks of one sequence, as the engine has them between two steps."""
        nothing = Table(request_id=request_id, index=index)
        if self.state is not EngineState.READY or request_id not in self._generations:
            return nothing
        asked = self._tables.get((request_id, index))
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._tables[request_id, index] = asked
            self._supervisor.send(FetchTable(request_id, index))
        # One who goes away does not take the answer from another who asked the same.
        return await asyncio.shield(asked)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error; their consumers close them."""
        for generation in list(self._generations.values()):
            self._end(generation, error)

    def _end(self, generation: Generation, error: Exception) -> None:
        del self._generations[generation.request.request_id]
        generation.fail(error)
        self._end_trial(generation)

    def forget(self, generation: Generation, *, complete: bool) -> None:
        """Its consumer wants no more of a request; what the engine still does for it ends."""
        request_id = generation.request.request_id
        if self._generations.get(request_id) is not generation:
            return
        del self._generations[request_id]
        if complete:
            self._quarantine.absolve(generation.request)
        else:
            self.abort(request_id)
        self._end_trial(generation)

    def _is_busy(self) -> bool:
        """Whether the engine owes something; what was held back, or is not read yet, is not its."""
        return any(one.is_awaited for one in self._generations.values() if one not in self._held)

    def _on_report(self, report: StepReport) -> None:
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
            self._answer(table)
        if report.stats is not None:
            for observe in self.observers:
                observe(report)

    def _answer(self, table: Table) -> None:
        asked = self._tables.pop((table.request_id, table.index), None)
        if asked is not None and not asked.done():
            asked.set_result(table)

    def _forget_sequences(self) -> None:
        self.sequences = ()
        for request_id, index in list(self._tables):
            self._answer(Table(request_id=request_id, index=index))

    def _on_death(self, error: EngineDiedError) -> None:
        self._forget_sequences()
        self._on_trial, held = None, set(map(id, self._held))
        self._held.clear()
        process = self._supervisor.process
        starting = set() if process is None else process.beacon.started()
        # Of those that the engine was given, it worked on some, and others waited.
        given = [
            one for one in self._generations.values() if id(one) not in held and one.is_awaited
        ]
        lost = {
            one.request.request_id: one
            for one in given
            if one.started or name_of(one.request.request_id) in starting
        }
        if error.by_itself and lost:
            logger.warning("the engine died while it worked on %s", ", ".join(lost))
            self._quarantine.strike(one.request for one in lost.values())
        for generation in given:
            is_lost = generation.request.request_id in lost
            if is_lost or generation.submissions >= MAX_SUBMISSIONS:
                self._end(generation, error)

    def _on_ready(self) -> None:
        for generation in list(self._generations.values()):
            if generation.is_awaited:  # else it is only read by and by
                generation.submissions += 1
                self._submit(generation)
        self._wake(None)

    def _on_outage(self, error: EngineUnavailableError) -> None:
        self._forget_sequences()
        self.fail_all(error)
        self._wake(error)
