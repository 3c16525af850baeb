"""Starts one engine process, talks to it and reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance import log
from appliance.config import cache_dir
from appliance.engine.messages import Shutdown
from appliance.engine.process.connection import Connection
from appliance.engine.process.entry import DUMP_STACKS_SIGNAL
from appliance.engine.process.metadata import beacon_of, create_metadata, map_metadata
from appliance.errors import EngineError
from appliance.runtime import ALLOCATOR, OPENMP, child_environment

if TYPE_CHECKING:
    from asyncio.subprocess import Process

# -P: import nothing from the current folder.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "appliance.engine.process")

_EXIT_SECONDS = 5.0  # for a process whose connection has ended, or that was told to end

logger = logging.getLogger(__name__)


class EngineProcess:
    """A started process, its connection and its block metadata."""

    def __init__(self, process: Process, connection: Connection, metadata: memoryview) -> None:
        self.connection = connection
        self.metadata = metadata  # 64-bit words, written by the engine
        self.beacon = beacon_of(metadata)
        self._process = process

    @classmethod
    async def spawn(cls, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
        """Start a process; it then waits for a `Load`.

        Raises:
            EngineError: the system is out of processes, descriptors or memory.
        """
        try:
            return await cls._spawn(command)
        except OSError as error:
            reason = error.strerror or error
            raise EngineError(f"the engine process cannot be started: {reason}") from error

    @classmethod
    async def _spawn(cls, command: Sequence[str]) -> EngineProcess:
        ours, theirs = socket.socketpair()
        level, form = log.configured()
        with contextlib.ExitStack() as undo:  # release it all if a later call fails
            undo.enter_context(theirs)
            connection = await Connection.over(ours)
            undo.callback(connection.close)
            metadata = create_metadata()
            undo.callback(os.close, metadata)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", str(theirs.fileno()), "--metadata", str(metadata)),
                *("--parent", str(os.getpid()), "--log-level", level, "--log-format", form),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # a library's prints belong in the log
                pass_fds=(theirs.fileno(), metadata),
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal goes only to the server
            )
            undo.pop_all()
            theirs.close()
        return cls(process, connection, map_metadata(metadata, writable=False))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def dump_stacks(self) -> None:
        """Make the process write the stacks of all its threads to the log."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(DUMP_STACKS_SIGNAL)

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End the process after its current step, or by force after a few seconds."""
        self.connection.send(Shutdown())
        await self.wait()

    @property
    def exit_code(self) -> int | None:
        """Exit code of an ended process, negative if a signal ended it."""
        return self._process.returncode

    async def wait(self) -> str:
        """Close the connection, wait for the process to end and say how it ended."""
        self.connection.close()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the engine process does not end; killing it")
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
        code = await self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


def _environment() -> dict[str, str]:
    """Return the engine's environment: everything but the API key, which it does not need.

    Compiled GPU kernels go beside our other derived files.
    """
    kernels = {"TRITON_CACHE_DIR": str(cache_dir() / "triton")}
    return {**ALLOCATOR, **OPENMP, **kernels, **child_environment()}
