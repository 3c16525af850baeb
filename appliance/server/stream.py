"""Server-sent events with keep-alive, and a watch for clients that go away.

Nothing is sent before the first frame or the first keep-alive, so that an error until then still
has its own status; one after that is a frame with `error`, and then the stream ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from appliance.errors import ApplianceError
from appliance.server.errors import describe, error_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

KEEP_ALIVE_SECONDS = 10.0  # of silence, before a comment is sent
STALL_SECONDS = 60.0  # for a client that does not read
DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_KEEP_ALIVE = b": keep-alive\n\n"

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client went away; nobody will read an answer."""


def data_frame(content: Any) -> bytes:
    """One frame of an OpenAI stream."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run something for a client that is waiting; cancel it as soon as the client goes away.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """A response that sends frames as they come.

    Args:
        frames: complete frames.
        on_close: called when the stream is over, however it ended, even if it never began.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # of the empty body that is not sent
        self._frames = frames
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, unless the client goes away."""
        stream = _Stream(scope, receive, send, self)
        keep_alive = asyncio.create_task(stream.keep_alive(KEEP_ALIVE_SECONDS))
        try:
            await unless_disconnected(receive, stream.send_all(self._frames))
        except ClientGoneError as error:
            logger.debug("the client of a stream went away: %s", error)
        finally:
            keep_alive.cancel()
            await asyncio.gather(keep_alive, return_exceptions=True)
            await self._frames.aclose()
            self._on_close()


class _Stream:
    """One stream being sent; the lock keeps frames and keep-alive comments apart."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, response: Response) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._response = response
        self._lock = asyncio.Lock()
        self._started = False
        self._ended = False
        self._last_sent = time.monotonic()

    async def send_all(self, frames: AsyncGenerator[bytes, None]) -> None:
        try:
            async for frame in frames:
                await self._write(frame)
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, ApplianceError):
                logger.exception("a stream failed")
            await self._fail(error)
        else:
            await self._write(b"", last=True)

    async def keep_alive(self, seconds: float) -> None:
        while True:
            quiet = time.monotonic() - self._last_sent
            if quiet >= seconds:
                await self._write(_KEEP_ALIVE)
            await asyncio.sleep(max(0.001, seconds - quiet % seconds))

    async def _fail(self, error: Exception) -> None:
        async with self._lock:
            if not self._started:
                self._started = self._ended = True
                await error_response(error)(self._scope, self._receive, self._send)
                return
        _, body, _ = describe(error)
        await self._write(data_frame(body), last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with self._lock:
            if self._ended:
                return
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    if not self._started:
                        self._started = True
                        await self._send(
                            {
                                "type": "http.response.start",
                                "status": self._response.status_code,
                                "headers": self._response.raw_headers,
                            }
                        )
                    await self._send(
                        {"type": "http.response.body", "body": data, "more_body": not last}
                    )
            except TimeoutError:
                raise ClientGoneError(f"nothing was read for {STALL_SECONDS:.0f} s") from None
            self._ended = last
            self._last_sent = time.monotonic()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
