"""The listening socket; bound first, so that a busy port fails at once."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from appliance.config import known_keys, local_url
from appliance.errors import ConfigError
from appliance.server.http.origins import is_loopback

if TYPE_CHECKING:
    from appliance.config import ServerConfig

_BACKLOG = 512


def bind(config: ServerConfig) -> socket.socket:
    """Open the listening socket.

    Raises:
        ConfigError: the address is unavailable, or would be open to everyone without a key.
    """
    host, port = config.host, config.port
    if not is_loopback(host) and not known_keys(config):
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
    # asyncio turns off Nagle's delay, 40 ms per response, only for a socket with its protocol
    # named.
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
    """Return the server's URL on this machine."""
    return local_url(config.host, sock.getsockname()[1], tls=config.tls_cert is not None)


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop what listens there, or choose another with "
            f"--port"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}; choose another with --host"
