"""A client's connection: HTTP/1.1 with time limits and a share of connections.

No client can hold a connection: a request's head has seconds to arrive, an unread body has a
deadline, and the client must read answers at a minimum rate. At the limit of connections, the
server closes an idle one or refuses the new one.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from appliance.errors import RequestError
from appliance.server.http.errors import TooManyConnectionsError, describe

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Message, Receive, Scope, Send

HEADER_SECONDS = 10.0  # for a request's head, from its first byte
LINGER_SECONDS = 5.0  # for the rest of a body after its answer
STALL_SECONDS = 60.0  # for a client that stops reading
CHECK_SECONDS = 10.0
LEAST_RATE = 1024  # bytes per second; slower counts as stopped
# ASGI extension: a function that writes a piece of a begun response without content-length. It
# returns False if it cannot write at once; then send the piece as usual.
CHUNKS = "appliance.chunks"
# Bytes that may wait in the kernel, and again as many before it. Small, because slow readers show
# only once these are full: the default is megabytes.
_UNSENT_BYTES = 4 * 1024


def protocol_of(max_connections: int) -> Callable[..., HttpProtocol]:
    """Return uvicorn's factory of connections, limited over all clients."""
    return partial(HttpProtocol, max_connections=max_connections)


class HttpProtocol(H11Protocol):
    """One connection.

    h11 is strict and limits input, but is slow per piece of a stream. So responses may write pieces
    past it, see `CHUNKS`.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = self.app
        self.app = self._serve
        self._max_connections = max_connections
        self._idle_since = 0.0
        self._deadline: asyncio.TimerHandle | None = None  # for a head or an unread body
        self._deadline_of = ""
        self._check: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes at the last check
        self._stalled = 0.0  # seconds without progress
        self._wrote = False  # since the last check

    @property
    def is_idle(self) -> bool:
        """True if no request is open."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit unsent bytes, start the clocks and make room for this connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._idle_since = self.loop.time()
        self._check = self.loop.call_later(CHECK_SECONDS, self._check_progress)
        self._set_deadline("head", HEADER_SECONDS)
        self._make_room()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._unset_keepalive_if_required()
        self._clear_deadline()
        if self._check is not None:
            self._check.cancel()

    def data_received(self, data: bytes) -> None:
        """Receive bytes and set a deadline for a new request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        """Reset the deadlines for the next request."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._watch_request()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error body, unless an answer has begun."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(RequestError("the request is not valid HTTP/1.1"), status)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: HTTP/1.1 may answer an upgrade request."""

    def _refuse(self, error: Exception, status: int | None = None) -> None:
        usual, body, headers = describe(error)
        status, content = status or usual, msgspec.json.encode(body)
        headers |= {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {status} ".encode() + STATUS_PHRASES.get(status, b"")]
        lines += [f"{name}: {value}".encode() for name, value in headers.items()]
        self.transport.write(b"\r\n".join([*lines, b"", content]))

    def _make_room(self) -> None:
        """Close the longest idle connection if there are too many."""
        if len(self.connections) <= self._max_connections:
            return
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_ones) <= self._max_connections:
            return
        others = [one for one in open_ones if one is not self and isinstance(one, HttpProtocol)]
        idle = [one for one in others if one.is_idle and not one._has_unsent]
        if idle:
            min(idle, key=lambda one: one._idle_since).transport.close()
            return
        self.logger.warning(
            "%d connections are open and all in use; the next is refused", len(open_ones) - 1
        )
        self._refuse(TooManyConnectionsError(f"{len(open_ones) - 1} connections are open already"))
        self.transport.close()

    @property
    def _has_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def _watch_request(self) -> None:
        """Set a deadline for an unfinished head, or for a body that no route reads."""
        if self.transport.is_closing() or not self.is_idle:
            self._clear_deadline()
        elif self.conn.their_state is h11.SEND_BODY:
            self._set_deadline("body", LINGER_SECONDS)
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._set_deadline("head", HEADER_SECONDS)
        else:
            self._clear_deadline()
            if self.timeout_keep_alive_task is None:  # the unread body has just ended
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _set_deadline(self, of: str, seconds: float) -> None:
        """Keep the current deadline of the same cause: more bytes do not extend it."""
        if self._deadline is None or self._deadline_of != of:
            self._clear_deadline()
            self._deadline = self.loop.call_later(seconds, self.transport.close)
            self._deadline_of = of

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_progress(self) -> None:
        """Close the connection if its client stopped reading, even while it is closing."""
        unsent = self.transport.get_write_buffer_size()
        read = self._wrote or not unsent or unsent < self._unsent - LEAST_RATE * CHECK_SECONDS
        self._stalled = 0.0 if read else self._stalled + CHECK_SECONDS
        self._unsent, self._wrote = unsent, False
        if self._stalled >= STALL_SECONDS:
            self.logger.info("a client read nothing for %.0f s", self._stalled)
            self.transport.abort()
        else:
            self._check = self.loop.call_later(CHECK_SECONDS, self._check_progress)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {CHUNKS: partial(self._write_chunk, self.cycle)}

        async def send_noted(message: Message) -> None:
            await send(message)
            self._wrote = True

        await self._application(scope, receive, send_noted)

    def _write_chunk(self, cycle: RequestResponseCycle, piece: bytes) -> bool:
        if not (piece and cycle.response_started) or cycle.response_complete:
            return False  # an empty chunk would end the response
        if self.flow.write_paused:
            return False
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._wrote = True
        return True
