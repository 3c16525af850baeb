"""One engine process as the API process holds it: start, talk, find out how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance.config import ENV_PREFIX
from appliance.engine.messages import FromEngine, Shutdown, ToEngine
from appliance.engine.process.entry import DUMP_STACKS_SIGNAL
from appliance.engine.process.framing import FrameDecoder, encode_frame
from appliance.engine.process.metadata import create_metadata, map_metadata
from appliance.runtime import ALLOCATOR, OPENMP

if TYPE_CHECKING:
    from asyncio.subprocess import Process

# -P: nothing in the folder that a person happens to stand in is imported.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "appliance.engine.process")

_READ_BYTES = 1 << 18
_EXIT_SECONDS = 5.0  # for a process whose connection has ended, or that was told to end

logger = logging.getLogger(__name__)


class EngineProcess:
    """A started process, its end of the socket and its block metadata."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        metadata: memoryview,
    ) -> None:
        self.metadata = metadata  # (MAX_BLOCKS,) 64-bit words, written by the engine
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._received: deque[FromEngine] = deque()

    @classmethod
    async def spawn(cls, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
        """Start a process; it then waits for a `Load`."""
        ours, theirs = socket.socketpair()
        metadata = create_metadata()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", str(theirs.fileno()), "--metadata", str(metadata)),
                *("--parent", str(os.getpid()), "--log-level", str(logger.getEffectiveLevel())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what a library prints belongs with the log
                pass_fds=(theirs.fileno(), metadata),
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is for the server alone
            )
        return cls(process, reader, writer, map_metadata(metadata, writable=False))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; one that cannot be delivered any more is dropped."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def receive(self) -> FromEngine | None:
        """The next message; None means that the connection has ended.

        Raises:
            FrameError: the engine sent something that is no message.
        """
        while not self._received:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received += self._decoder.feed(data)
        return self._received.popleft()

    def dump_stacks(self) -> None:
        """Have the process write the stacks of all its threads to the log."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(DUMP_STACKS_SIGNAL)

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End the process after its current step, or after a few seconds by force."""
        self.send(Shutdown())
        await self.wait()

    async def wait(self) -> str:
        """Close the connection, wait for the end of the process; says how it ended."""
        self._writer.close()
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
    """The environment of the engine: everything but the API key, which is none of its business."""
    environment = {**ALLOCATOR, **OPENMP, **os.environ}
    environment.pop(f"{ENV_PREFIX}API_KEY", None)
    return environment
