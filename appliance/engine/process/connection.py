"""The API process's end of the socket to an engine.

Handles messages in the call that receives their bytes, so that an engine step wakes only tasks that
wait for its tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import FromEngine, ToEngine
from appliance.engine.process.framing import FrameDecoder, encode_frame

if TYPE_CHECKING:
    import socket


class EngineConnection(asyncio.Protocol):
    """Receives an engine process's messages and keeps them until taken."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
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
            self._transport.write(encode_frame(message))

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
            for message in self._decoder.feed(data):
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
