"""The engine process's loop: load the model, step while there is work, otherwise sleep.

An error caused by one request ends only that request; any other ends the process, and its
supervisor reacts.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING

import msgspec

from appliance import log
from appliance.engine.memory.admission import Admission
from appliance.engine.nouns.messages import (
    Abort,
    EndTokens,
    FetchTable,
    Load,
    LoadAdapter,
    Proceed,
    Progress,
    Ready,
    SequenceDelta,
    Shutdown,
    StartFailed,
    StepReport,
    Submit,
    UnloadAdapter,
    Vocabulary,
)
from appliance.engine.nouns.request import FinishReason
from appliance.engine.process.engine_socket import EngineSocket, SupervisorGoneError
from appliance.engine.process.metadata import beacon_of
from appliance.engine.process.report_pieces import pieces_of
from appliance.errors import ApplianceError, RequestError
from appliance.runtime import see_one_gpu

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from appliance.engine.nouns.messages import ToEngine
    from appliance.engine.nouns.request import Request
    from appliance.engine.process.engine_core import EngineCore, LoadEngine
    from appliance.log import RecentWarnings

SNAPSHOT_SECONDS = 0.25  # between stats and sequences while there is work

logger = logging.getLogger(__name__)


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
            see_one_gpu(message.gpu)
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
