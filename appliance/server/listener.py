"""The socket that clients connect to; bound first, so that a busy port shows at once."""

from __future__ import annotations

import errno
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from appliance.config import local_url
from appliance.errors import ConfigError
from appliance.server.door import is_loopback

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

    from appliance.config import ServerConfig

HEADER_SECONDS = 10.0
# An ASGI extension: a function that writes a piece of a response that has begun and has no
# content-length. False if that cannot be done at once; then the piece is to be sent as usual.
CHUNKS = "appliance.chunks"
_BACKLOG = 512
# Bytes that may lie unsent in the kernel, and again as many before it. What reads slowly is given
# less, as with a dashboard's feed, only if it is seen to: by default megabytes fit in between.
_UNSENT_BYTES = 4 * 1024


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be had, or would be open to all without a key.
    """
    host, port = config.host, config.port
    if not is_loopback(host) and not config.keys():
        raise ConfigError(
            f"{host} can be reached from other machines, so an API key is needed: set "
            "APPLIANCE_API_KEY, or listen on 127.0.0.1"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise ConfigError(f"{host!r} is no address of this machine; use --host 127.0.0.1") from None
    # asyncio turns off Nagle's delay, 40 ms per response, only where the protocol is named.
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_why(error, host, port)) from None
    sock.setblocking(False)
    return sock


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    return local_url(config.host, sock.getsockname()[1])


class HttpProtocol(H11Protocol):
    """HTTP/1.1 that gives up on a connection whose first request does not come.

    h11 is strict and bounds what a stranger may send, but takes its time over every piece of a
    stream. Responses may therefore write pieces past it, see `CHUNKS`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = self.app
        self.app = self._serve

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep little unsent, and start the clock."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self.loop.call_later(HEADER_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {CHUNKS: partial(self._write_chunk, self.cycle)}
        await self._application(scope, receive, send)

    def _write_chunk(self, cycle: RequestResponseCycle, piece: bytes) -> bool:
        if not (piece and cycle.response_started) or cycle.response_complete:
            return False  # an empty chunk would be the end
        if self.flow.write_paused:
            return False
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop what listens there, or choose another with "
            f"--port"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}; choose another with --host"
