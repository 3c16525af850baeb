"""Talks to one engine process and reports how it ended.

Handles messages in the call that receives their bytes, so that an engine step wakes only tasks that
wait for its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import FromEngine, Shutdown, ToEngine
from appliance.engine.process.framing import MAX_REQUEST_BYTES, FrameDecoder, encode_frame
from appliance.engine.process.launch import (
    DUMP_STACKS_SIGNAL,
    ENGINE_COMMAND,
    LaunchedProcess,
    beacon_of,
    map_metadata,
)
from appliance.errors import EngineError

if TYPE_CHECKING:
    import socket
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
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes as its wait ends.
            async with asyncio.timeout(_EXIT_SECONDS):
                await asyncio.shield(ended)
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


class EngineConnection(asyncio.Protocol):
    """Receives an engine process's messages and keeps them until taken."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._kept: deque[FromEngine] = deque()
        self._take: Callable[[FromEngine], object] = self._keep
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    async def over(cls, sock: socket.socket) -> EngineConnection:
        """Wrap and own a connected socket."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(cls, sock=sock)
        return connection

    def send(self, message: ToEngine) -> None:
        """Queue a message; drop it if the connection is closing."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message, MAX_REQUEST_BYTES))

    async def receive(self) -> FromEngine | None:
        """Return the next message; None at the end of the connection.

        Raises:
            FrameError: the engine sent invalid bytes.
        """
        while not self._kept and not self._ended:
            await self._change()
        if self._kept:
            return self._kept.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def pass_on(self, take: Callable[[FromEngine], object]) -> None:
        """Call `take` with every message until the connection ends.

        Raises:
            FrameError: the engine sent invalid bytes.
            Exception: raised by `take`, which is not called again.
        """
        while self._kept:
            take(self._kept.popleft())
        self._take = take
        try:
            while not self._ended:
                await self._change()
        finally:
            self._take = self._keep
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the connection once everything sent has been delivered."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode and pass on messages (called by asyncio)."""
        if self._ended:
            return
        try:
            for message in self.decoder.feed(data):
                self._take(message)
        except Exception as error:
            self._error = error
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """End the connection (called once by asyncio); a reset counts as an end."""
        self._end()

    def _keep(self, message: FromEngine) -> None:
        self._kept.append(message)
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _name_of(number: int) -> str:
    """Return a signal's name; most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
