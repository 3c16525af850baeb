"""Requests in, deltas out: the engine as the API process sees it, whichever process runs it.

When a process dies, requests that it had started end with an error and those that still waited
are given to the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from appliance.engine.messages import (
    Abort,
    FetchTable,
    Load,
    SequenceDelta,
    StepReport,
    Submit,
    Table,
)
from appliance.engine.process.child import ENGINE_COMMAND
from appliance.engine.process.supervisor import EngineState, SupervisionLimits, Supervisor
from appliance.engine.request import FinishReason
from appliance.errors import (
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    QueueTimeoutError,
    RequestAbortedError,
    RequestError,
)
from appliance.stats import EngineStats, SequenceView

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.engine.request import Request

# A request that waited is given to the next process this often. More would let one that kills the
# engine before its first report take the server down with it.
MAX_SUBMISSIONS = 2
MAX_BACKLOG = 4096  # deltas that a consumer may be behind


class Generation(AsyncIterator[SequenceDelta]):
    """The deltas of one request, as they come; submitted on construction.

    Close it in every case: closing early aborts the request.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self.request = request
        self.started = False  # the engine has taken it from its queue
        self.submissions = 1
        self._client = client
        self._open = set(range(request.sampling.num_choices))
        self._arrived: deque[SequenceDelta] = deque()
        self._error: Exception | None = None  # what comes after them
        self._waiter: asyncio.Future[None] | None = None

    @property
    def backlog(self) -> int:
        """Deltas that have come and were not asked for yet."""
        return len(self._arrived)

    async def __anext__(self) -> SequenceDelta:
        """The next delta of a choice that is open.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine failed on it, or died.
        """
        while self._open:
            if (delta := self.ready()) is not None:
                return delta
            if self._error is not None:
                raise self._error
            if self._open:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        raise StopAsyncIteration

    def ready(self) -> SequenceDelta | None:
        """The next delta if it has come already; an error that has come is left to the iterator."""
        while self._arrived and self._open:
            delta = self._arrived.popleft()
            if delta.index not in self._open:
                continue
            if delta.finish_reason is FinishReason.ABORT:
                self._fail(EngineError("the engine aborted this request"))
                return None
            if delta.finish_reason is not None:
                self._open.remove(delta.index)
            return delta
        return None

    def close_choice(self, index: int) -> None:
        """Stop one choice; the others go on."""
        if index in self._open:
            self._open.remove(index)
            self._client.abort(self.request.request_id, index)

    def close(self) -> None:
        """Forget the request, and abort what the engine still does for it."""
        self._client._forget(self, abort=bool(self._open))
        self._open.clear()

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.close()

    def _put(self, delta: SequenceDelta) -> None:
        if delta.error is not None:
            self._fail(_error_of(delta, delta.error))
        elif self._error is None:
            self._arrived.append(delta)
            self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _error_of(delta: SequenceDelta, message: str) -> Exception:
    if delta.expired:
        return QueueTimeoutError(message)
    return RequestError(message) if delta.refused else EngineError(message)


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
        self._config = config
        self._generations: dict[str, Generation] = {}
        self._tables: dict[tuple[str, int], asyncio.Future[Table]] = {}
        self._supervisor = Supervisor(
            command,
            limits,
            on_report=self._on_report,
            on_death=self._on_death,
            on_ready=self._on_ready,
            on_failure=self._on_failure,
            is_busy=lambda: bool(self._generations),
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

    async def close(self, *, now: bool = False) -> None:
        """End the engine after its step, or now; what is in flight fails."""
        self.fail_all(EngineUnavailableError("the server is shutting down"))
        self._forget_sequences()
        await self._supervisor.close(now=now)

    def generate(self, request: Request) -> Generation:
        """Submit a request at once; iterate for its deltas.

        Raises:
            EngineUnavailableError: the engine is not ready.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(f"the engine is {self.state.value}")
        assert request.request_id not in self._generations
        generation = Generation(self, request)
        self._generations[request.request_id] = generation
        self._supervisor.send(Submit(request))
        return generation

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
        generation._fail(error)

    def _forget(self, generation: Generation, *, abort: bool) -> None:
        request_id = generation.request.request_id
        if self._generations.get(request_id) is generation:
            del self._generations[request_id]
            if abort:
                self.abort(request_id)

    def _on_report(self, report: StepReport) -> None:
        for request_id in report.started:
            if generation := self._generations.get(request_id):
                generation.started = True
        for delta in report.deltas:
            if generation := self._generations.get(delta.request_id):
                generation._put(delta)
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
        for generation in list(self._generations.values()):
            if generation.started or generation.submissions >= MAX_SUBMISSIONS:
                self._end(generation, error)

    def _on_ready(self) -> None:
        for generation in self._generations.values():
            generation.submissions += 1
            self._supervisor.send(Submit(generation.request))

    def _on_failure(self, error: EngineUnavailableError) -> None:
        self._forget_sequences()
        self.fail_all(error)
