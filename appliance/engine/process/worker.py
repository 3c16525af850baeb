"""The engine process: load the model, step while there is work, otherwise sleep.

Takes inherited descriptors and never outlives the parent. An error caused by one request ends only
that request; any other ends the process, and its supervisor reacts.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from appliance import log
from appliance.config import cache_dir
from appliance.engine.memory.admission import Admission
from appliance.engine.nouns.messages import (
    Abort,
    EndTokens,
    FetchTable,
    Load,
    LoadAdapter,
    MemoryPlanned,
    Proceed,
    Progress,
    Ready,
    SequenceDelta,
    Shutdown,
    StartFailed,
    StepReport,
    Submit,
    ToEngine,
    UnloadAdapter,
    Vocabulary,
    WeightsRead,
)
from appliance.engine.nouns.request import FinishReason
from appliance.engine.process.framing import (
    MAX_REQUEST_BYTES,
    FrameDecoder,
    encode_frame,
    pieces_of,
)
from appliance.engine.process.launch import DUMP_STACKS_SIGNAL, beacon_of, map_metadata
from appliance.errors import ApplianceError, EngineError, RequestError
from appliance.runtime import die_with_parent, see_gpus

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.nouns.messages import EngineInfo, FromEngine, Table
    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.log import RecentWarnings
    from appliance.stats import EngineStats, SequenceView, StepView


AnswerT = TypeVar("AnswerT", Proceed, EndTokens)
_READ_BYTES = 1 << 20
SNAPSHOT_SECONDS = 0.25  # between stats and sequences while there is work
logger = logging.getLogger(__name__)


def run_engine_process(arguments: Sequence[str], find_loader: Callable[[], LoadEngine]) -> int:
    """Serve on the descriptors that the supervisor passes; return the exit code."""
    parser = argparse.ArgumentParser(prog="appliance.engine.process")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--metadata", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    keep_compiled_kernels()
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS_SIGNAL, all_threads=True)
    with socket.socket(fileno=options.socket) as sock:
        return run_worker(sock, map_metadata(options.metadata, writable=True), find_loader)


def keep_compiled_kernels() -> None:
    """Put compiled GPU kernels into the cache folder, unless the user set one."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))


def run_worker(
    sock: socket.socket,
    metadata: memoryview,
    find_loader: Callable[[], LoadEngine],
) -> int:
    """Load and serve until the peer disconnects; return the exit code.

    Args:
        sock: the engine's end of the socket pair.
        metadata: one word per block and the beacon, shared with the peer.
        find_loader: imports the engine's loader, while the peer prepares its `Load`.
    """
    connection = EngineSocket(sock)
    try:
        load = find_loader()
        first = connection.receive(wait=True)
        if not first or isinstance(first[0], Shutdown):
            return 0
        (message,) = first
        assert isinstance(message, Load)
        warnings = log.configure(message.log_level, message.log_format)
        if message.gpu:
            see_gpus(message.gpu)
        engine = load(
            message.config,
            eos_token_ids=connection.ask_for_end_tokens,
            metadata=metadata,
            beacon=beacon_of(metadata),
            on_progress=lambda stage, done, total: connection.send(Progress(stage, done, total)),
            admission=Admission(message.memory_limit, message.is_shared, connection.ask_for_memory),
        )
    except SupervisorGoneError:
        return 0
    except ApplianceError as error:
        connection.send(StartFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine could not be loaded")
        connection.send(StartFailed(f"the engine could not be loaded: {error!r}", 6))
        return 6
    # Until here a signal ends the process; from here on it ends after the current step.
    signal.signal(signal.SIGTERM, lambda number, frame: connection.close_reading())
    connection.watch([rank.pid for rank in engine.info.ranks[1:]])
    connection.send(Ready(engine.info))
    EngineLoop(engine, connection, warnings).run()
    engine.close()
    return 0


class EngineLoop:
    def __init__(
        self, engine: EngineCore, connection: EngineSocket, warnings: RecentWarnings
    ) -> None:
        self._engine = engine
        self._warnings = warnings
        self._connection = connection
        self._next_snapshot = 0.0
        self._ended = False

    def run(self) -> None:
        """Serve until told to end or disconnected."""
        self._connection.send(self._with_snapshot(StepReport()))
        while not self._ended:
            messages = self._connection.receive(wait=not self._engine.has_work)
            for message in messages:
                self._handle(message)
            if self._connection.closed:
                break
            if self._engine.has_work:
                self._step()
            elif messages:
                self._connection.send(self._with_snapshot(StepReport()))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Abort(request_id, index):
                self._engine.abort(request_id, index)
            case FetchTable(request_id, index):
                table = self._engine.block_table(request_id, index)
                self._connection.send(StepReport(tables=(table,)))
            case Vocabulary():
                self._engine.set_vocabulary(message)
            case LoadAdapter(ref):
                self._engine.load_adapter(ref)
            case UnloadAdapter(ref):
                self._engine.unload_adapter(ref)
            case Shutdown():
                self._ended = True
            case Load() | Proceed() | EndTokens():
                raise AssertionError(f"a second {type(message).__name__}")

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._reject(request, str(error), refused=True)
        except Exception as error:
            logger.exception("request %s failed on submission", request.request_id)
            self._reject(request, f"the engine failed on this request: {error!r}", refused=False)

    def _reject(self, request: Request, message: str, *, refused: bool) -> None:
        delta = SequenceDelta(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error=message,
            refused=refused,
        )
        self._connection.send(StepReport(deltas=(delta,), started=(request.request_id,)))

    def _step(self) -> None:
        report = self._engine.step()
        if time.monotonic() >= self._next_snapshot or not self._engine.has_work:
            report = self._with_snapshot(report)
        # Sent even if empty: the watchdog counts a report as progress.
        for piece in pieces_of(report):
            self._connection.send(piece)

    def _with_snapshot(self, report: StepReport) -> StepReport:
        self._next_snapshot = time.monotonic() + SNAPSHOT_SECONDS
        return msgspec.structs.replace(
            report,
            stats=self._engine.stats(),
            sequences=self._engine.sequences(),
            steps=self._engine.take_steps(),
            logs=self._warnings.take(),
        )


class SupervisorGoneError(Exception):
    """The supervisor told this process to end, or went away."""


class EngineSocket:
    """Writes block; reads wait only on request."""

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._socket = sock
        self._decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine, MAX_REQUEST_BYTES)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._ranks: dict[int, int] = {}  # process id by pidfd

    def send(self, message: FromEngine) -> None:
        """Send one message; the next read notices a lost client."""
        try:
            self._socket.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Return arrived messages; with `wait`, at least one unless the connection ended.

        Raises:
            EngineError: a watched process has ended.
        """
        messages: list[ToEngine] = []
        while not self.closed:
            ready = self._poll.poll(None if wait and not messages else 0)
            if not ready:
                break
            if ended := [self._ranks[file] for file, _ in ready if file in self._ranks]:
                raise EngineError(f"process {ended[0]}, which has a part of the model, has ended")
            data = self._socket.recv(_READ_BYTES)
            if not data:
                self.closed = True
            messages += self._decoder.feed(data)
        return messages

    def watch(self, pids: Sequence[int]) -> None:
        """Watch processes: a read raises when one has ended."""
        for pid in pids:
            file = os.pidfd_open(pid)
            self._ranks[file] = pid
            self._poll.register(file, select.POLLIN)

    def ask_for_memory(self, needed: int, free: int) -> None:
        """Send the memory plan and wait for permission, or raise SupervisorGoneError."""
        self.send(MemoryPlanned(needed, free))
        self._answer(Proceed)

    def ask_for_end_tokens(self) -> tuple[int, ...]:
        """Wait for the tokens that end an answer, or raise SupervisorGoneError."""
        self.send(WeightsRead())
        return self._answer(EndTokens).ids

    def _answer(self, kind: type[AnswerT]) -> AnswerT:
        answer = self.receive(wait=True)
        if not answer or not isinstance(answer[0], kind):
            raise SupervisorGoneError
        return answer[0]

    def close_reading(self) -> None:
        """Make a pending or the next read see the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)


class EngineCore(Protocol):
    info: EngineInfo

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        ...

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def submit(self, request: Request) -> None:
        """Queue a request, or raise RequestError."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Stop a request or one choice of it; return False if it is unknown."""
        ...

    def step(self) -> StepReport: ...

    def stats(self) -> EngineStats: ...

    def sequences(self) -> tuple[SequenceView, ...]: ...

    def take_steps(self) -> tuple[StepView, ...]: ...

    def load_adapter(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; a report has the answer."""
        ...

    def unload_adapter(self, ref: AdapterRef) -> None:
        """Forget an adapter once no request uses it."""
        ...

    def block_table(self, request_id: str, index: int) -> Table: ...

    def close(self) -> None:
        """Save everything that must outlive the process; takes some seconds at most."""
        ...


class LoadEngine(Protocol):
    """`load_engine`."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: Callable[[], tuple[int, ...]],
        metadata: memoryview | None,
        on_progress: Callable[[str, int, int], None],
        beacon: Beacon,
        admission: Admission,
    ) -> EngineCore:
        """Load a model, or raise ApplianceError."""
        ...
