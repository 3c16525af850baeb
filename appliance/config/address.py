"""A server's addresses: on this machine, for other machines, and for commands."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from appliance.config.api_keys import BARE_NAME
from appliance.config.server import ServerConfig, api_key_from_environment, known_keys
from appliance.config.sources import load_section

if TYPE_CHECKING:
    from appliance.config.top import TopConfig

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listening address to local address
_ELSEWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # addresses for documentation


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a server's host and port on this machine."""
    return _url(_EVERY_ADDRESS.get(host, host), port, tls=tls)


def network_url(host: str, port: int, *, tls: bool = False) -> str | None:
    """Return the URL for other machines if the host means all addresses, else None."""
    if host not in _ELSEWHERE:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(
                (_ELSEWHERE[host], 9)
            )  # sends nothing; it chooses the address to send from
            return _url(sock.getsockname()[0], port, tls=tls)
    except OSError:
        return None


def server_to_watch(url: str | None, path: Path | None = None) -> tuple[str, str | None]:
    """Return a command's server and the key to send.

    The key is the environment's, else the configured one, which is only sent to the configured
    server.

    Args:
        url: `TopConfig.url`; None for the configured server.
        path: configuration file; None for the usual place, if there is one.

    Raises:
        ConfigError: a setting of the server is unusable.
    """
    key = api_key_from_environment()
    if url is not None and (key is not None or not _is_here(url)):
        return url, key
    server = load_section(ServerConfig, {}, path)
    if url is not None and _port_of(url) != server.port:
        return url, key
    return (
        url or local_url(server.host, server.port, tls=server.tls_cert is not None),
        key or _key_to_watch(server),
    )


def authority_to_trust(top: TopConfig, path: Path | None = None) -> str | None:
    """Return the file of certificates that a command trusts; None for Python's.

    By default it is the configured server's certificate, for that server.

    Args:
        path: configuration file; None for the usual place, if there is one.
    """
    if top.ca_file is not None or top.url is not None:
        return top.ca_file
    return load_section(ServerConfig, {}, path).tls_cert


def _key_to_watch(server: ServerConfig) -> str | None:
    """Return the nameless key, or the only key; None if there are several named ones."""
    keys = known_keys(server)
    key = next(iter(keys.values())) if len(keys) == 1 else keys.get(BARE_NAME)
    return None if key is None else key.secret


def _is_here(url: str) -> bool:
    host = _split(url)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _port_of(url: str) -> int | None:
    return _split(url)[1]


def _split(url: str) -> tuple[str, int | None]:
    """Split off host and port; empty for an invalid address, which the command refuses."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", None


def _url(host: str, port: int, *, tls: bool) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
