"""Streams frames to a client, with keep-alive.

Sends nothing before the first frame or keep-alive, so an earlier error has its own status; a later
one is a frame with `error`, which ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, NoReturn

from starlette.responses import Response

from appliance.errors import ApplianceError
from appliance.server.http.client_gone import ClientGoneError, disconnect, guarded
from appliance.server.http.connection import CHUNKS
from appliance.server.http.errors import error_body, error_response
from appliance.server.http.frames import SERVER_SENT_EVENTS, Wire
from appliance.server.http.idempotency import FAILED

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

KEEP_ALIVE_SECONDS = 10.0  # of silence before a comment
STALL_SECONDS = 60.0  # for a client that stops reading

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_GZIP = zlib.MAX_WBITS | 16  # the gzip format


logger = logging.getLogger(__name__)


class EventStream(Response):
    """A response that streams frames.

    Args:
        frames: complete frames.
        holds: entered while the frames are read, and before the first; its errors are theirs.
        gzip: compress; every frame stays readable on arrival.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        wire: Wire = SERVER_SENT_EVENTS,
        holds: AbstractContextManager[object] | None = None,
        gzip: bool = False,
    ) -> None:
        headers = {**_HEADERS, "content-encoding": "gzip"} if gzip else _HEADERS
        super().__init__(headers=headers, media_type=wire.media_type)
        del self.headers["content-length"]  # of the empty body
        self.wire = wire
        self._frames = frames
        self._holds = holds or nullcontext()
        self._gzip = gzip

    async def handed_over(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames, to be sent by this stream or another."""
        with self._holds:
            async with aclosing(self._frames):
                async for frame in self._frames:
                    yield frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        packer = zlib.compressobj(level=1, wbits=_GZIP) if self._gzip else None
        stream = _Stream(scope, receive, send, self, packer)
        try:
            await guarded(stream.send_all(), stream.watch(), disconnect(receive))
        except ClientGoneError as error:
            logger.debug("the client of a stream went away: %s", error)


class _Stream:
    """Sends one stream; a lock separates frames and keep-alive comments.

    Frames set no timer: one task watches for silence and stalls.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        response: EventStream,
        packer: zlib._Compress | None,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._response = response
        self._packer = packer
        self._lock = asyncio.Lock()
        self._write_chunk: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(CHUNKS)
        self._started = False
        self._ended = False
        self._last = time.monotonic()  # time at which the last write began or ended

    async def send_all(self) -> None:
        try:
            async with aclosing(self._response.handed_over()) as frames:
                async for frame in frames:
                    if not self._write_at_once(frame):
                        await self._write(frame)
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, ApplianceError):
                logger.exception("a stream failed")
            await self._fail(error)
        else:
            await self._write(b"", last=True)

    async def watch(self) -> NoReturn:
        """Send comments while the stream is silent.

        Raises:
            ClientGoneError: a write stalls.
        """
        while True:
            limit = STALL_SECONDS if self._lock.locked() else KEEP_ALIVE_SECONDS
            quiet = time.monotonic() - self._last
            if quiet < limit:
                seconds = min(limit - quiet, KEEP_ALIVE_SECONDS, STALL_SECONDS)
                await asyncio.sleep(max(0.001, seconds))
            elif self._lock.locked():
                raise ClientGoneError(f"nothing was read for {STALL_SECONDS:.0f} s")
            else:
                await self._comment()

    async def _comment(self) -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._write(self._response.wire.keep_alive)
        except TimeoutError:
            raise ClientGoneError(f"nothing was read for {STALL_SECONDS:.0f} s") from None

    async def _fail(self, error: Exception) -> None:
        self._scope.setdefault("state", {})[FAILED] = True
        async with self._lock:
            if not self._started:
                self._started = self._ended = True
                response = error_response(error, self._scope)
                await response(self._scope, self._receive, self._send)
                return
        frame = self._response.wire.frame(error_body(error, self._scope))
        await self._write(frame, last=True)

    def _write_at_once(self, data: bytes) -> bool:
        """Write past locks and middlewares, if the stream is started, idle and uncompressed."""
        write = self._write_chunk
        if (
            write is None
            or self._packer is not None
            or not self._started
            or self._lock.locked()
            or not write(data)
        ):
            return False
        self._last = time.monotonic()
        return True

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with self._lock:
            if self._ended:
                return
            self._last = time.monotonic()
            if not self._started:
                self._started = True
                await self._send(
                    {
                        "type": "http.response.start",
                        "status": self._response.status_code,
                        "headers": self._response.raw_headers,
                    }
                )
            if self._packer is not None:
                mode = zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH
                data = self._packer.compress(data) + self._packer.flush(mode)
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
            self._ended = last
            self._last = time.monotonic()
