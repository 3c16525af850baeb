"""Sends a client one answer that several replicas may have begun. Imports no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from appliance.server.http.errors import error_body, error_response
from appliance.server.http.protocols import OPENAI, PROTOCOLS, protocol_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

RawHeaders = Iterable[tuple[bytes, bytes]]
STREAMS = {one.wire.media_type for one in (OPENAI, *PROTOCOLS)}

# Headers that the front's own server and door set, and those of one connection.
_NOT_PASSED_ON = {
    b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server",
    b"x-request-id", b"request-id", b"content-length", b"x-engine-died",
    b"access-control-allow-origin", b"access-control-expose-headers",
}  # fmt: skip


class Reply:
    """The answer to one request, which several replicas may have begun.

    Attributes:
        committed: the client has a status; another replica can continue only with a stream.
        begun: the client has part of the answer, so no other replica can continue.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.committed = self.begun = False
        self._scope, self._receive, self._send = scope, receive, send
        self._wire = protocol_of(scope).wire
        self._part = b""

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send an unstreamed answer."""
        if self.committed:  # a replica that died has sent comments
            await self._write(body if status == 200 else self._as_frame(body), last=True)
            return
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._write(body, last=True)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Start streaming, unless another replica's answer has begun."""
        self._part = b""
        if not self.committed:
            await self._start(status, headers)

    async def pass_on(self, data: bytes) -> None:
        """Send complete frames at once; hold back the rest.

        Half a frame before an error would make both unreadable.
        """
        data = self._part + data
        end = data.rfind(self._wire.frame_end) + len(self._wire.frame_end)
        if end < len(self._wire.frame_end):
            end = len(data) if not data.strip() else 0  # Ollama's keep-alive is a space
        self._part = data[end:]
        if end:
            frames = data[:end]
            self.begun = self.begun or bool(frames.replace(self._wire.keep_alive, b"").strip())
            await self._write(frames)

    async def end(self) -> None:
        await self._write(self._part, last=True)

    async def fail(self, error: Exception) -> None:
        """Answer with an error, in the stream if it has begun."""
        if not self.committed:
            await error_response(error, self._scope)(self._scope, self._receive, self._send)
            return
        frame = self._wire.frame(error_body(error, self._scope))
        await self._write(frame, last=True)

    def _as_frame(self, body: bytes) -> bytes:
        return self._wire.frame(msgspec.Raw(body))

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.committed = True
        kept = [(name, value) for name, value in headers if name.lower() not in _NOT_PASSED_ON]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
