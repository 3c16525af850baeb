"""Talks to one engine process and reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import Shutdown
from appliance.engine.process.connection import EngineConnection
from appliance.engine.process.launch import DUMP_STACKS_SIGNAL, ENGINE_COMMAND, LaunchedProcess
from appliance.engine.process.metadata import beacon_of, map_metadata
from appliance.errors import EngineError

if TYPE_CHECKING:
    from subprocess import Popen

_EXIT_SECONDS = 5.0  # for a process to exit after its connection ended, or after `Shutdown`

logger = logging.getLogger(__name__)


class EngineProcess:
    """A started process, its connection and its block metadata."""

    def __init__(
        self, process: Popen[bytes], connection: EngineConnection, metadata: memoryview
    ) -> None:
        self.connection = connection
        self.metadata = metadata  # 64-bit words, written by the engine
        self.beacon = beacon_of(metadata)
        self._process = process

    @classmethod
    async def spawn(cls, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
        """Start a process, which then waits for a `Load`.

        Raises:
            EngineError: the system is out of processes, descriptors or memory.
        """
        try:
            return await cls.over(LaunchedProcess(command))
        except OSError as error:
            reason = error.strerror or error
            raise EngineError(f"the engine process cannot be started: {reason}") from error

    @classmethod
    async def over(cls, launched: LaunchedProcess) -> EngineProcess:
        """Talk to a process that was started already; end it if that fails or is cancelled."""
        with contextlib.ExitStack() as undo:
            undo.push(launched)
            connection = await EngineConnection.over(launched.socket)
            undo.pop_all()
        metadata = map_metadata(launched.take(), writable=False)
        return cls(launched.process, connection, metadata)

    @property
    def pid(self) -> int:
        return self._process.pid

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(DUMP_STACKS_SIGNAL)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End the process after its current step, or by force after a few seconds."""
        self.connection.send(Shutdown())
        await self.wait()

    @property
    def exit_code(self) -> int | None:
        """Exit code of an ended process; negative for a signal."""
        return self._process.returncode

    async def wait(self) -> str:
        """Close the connection, wait for the process to end, and return how it ended."""
        self.connection.close()
        # A thread waits, because the process may be older than the event loop.
        ended = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        try:
            await asyncio.wait_for(asyncio.shield(ended), _EXIT_SECONDS)
        except TimeoutError:
            logger.warning("the engine process does not end; killing it")
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
        code = await ended
        if code < 0:
            return f"was killed by {_name_of(-code)}"
        return f"exited with code {code}"


def _name_of(number: int) -> str:
    """Return a signal's name; most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
