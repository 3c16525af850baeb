"""Fetches pictures from addresses in messages, of hosts that the owner of the server named.

Otherwise a client could have this machine ask whatever it reaches (server-side request forgery). So
the addresses of a name are checked once it is resolved, and the connection goes to these.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

import httpcore
import httpx

from appliance.errors import ImageFetchError, ImageTooLargeError
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

SECONDS = 20.0  # for a picture, name and redirects included
MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = (
    ("user-agent", f"appliance/{__version__}"),
    ("accept", "image/*"),
    ("accept-encoding", "identity"),
)
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # to IPv4 (RFC 6052)
_FAILURES = (
    httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError, TimeoutError,
    ValueError,  # names that IDNA has not, and ports that there are not
)  # fmt: skip


class ImageUrls:
    """The hosts whose pictures are fetched, and how.

    Args:
        hosts: separated by commas: names, `*.` before a name for those below it, `*` for all, or
            addresses. Names may mean public addresses only; an address that is named itself may be
            a private one.
    """

    def __init__(self, hosts: str) -> None:
        self._hosts = {word.strip().lower().strip("[]") for word in hosts.split(",")} - {""}

    async def fetch(self, url: str, most: int) -> bytes:
        """Return what an address holds.

        Args:
            most: bytes that it may hold.

        Raises:
            ImageFetchError: its host is not named or private, or it does not answer with 200.
            ImageTooLargeError: it holds more.
        """
        try:
            async with asyncio.timeout(SECONDS):
                return await self._follow(url, most)
        except _FAILURES as error:
            what = str(error) or f"no whole answer after {SECONDS:g} s"
            raise ImageFetchError(f"{url[:200]} cannot be fetched: {what}") from error

    async def _follow(self, url: str, most: int) -> bytes:
        backend = _CheckedConnections(self._hosts)
        async with httpcore.AsyncConnectionPool(network_backend=backend) as pool:
            for _ in range(MOST_REDIRECTS + 1):
                target = self._checked(url)
                async with pool.stream("GET", str(target), headers=_HEADERS) as response:
                    headers = {name.lower(): value for name, value in response.headers}
                    if response.status in _REDIRECTS and b"location" in headers:
                        url = str(target.join(headers[b"location"].decode("latin-1")))
                        continue
                    if response.status != 200:
                        raise ImageFetchError(f"{url[:200]} answers {response.status}")
                    return await _body(response, url, most)
        raise ImageFetchError(f"{url[:200]} is reached after more than {MOST_REDIRECTS} redirects")

    def _checked(self, url: str) -> httpx.URL:
        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ImageFetchError(f"{url[:200]!r} is no address: {error}") from error
        host = target.raw_host.decode("ascii").lower()
        if target.scheme not in ("http", "https") or not host or target.userinfo:
            raise ImageFetchError(f"{url[:200]!r} is no http or https address without a password")
        parts = host.split(".")
        above = {f"*.{'.'.join(parts[place:])}" for place in range(1, len(parts))}
        if self._hosts.isdisjoint({"*", host.strip("[]"), *above}):
            raise ImageFetchError(
                f"no pictures are fetched from {host}; the server's allow_image_urls names hosts"
            )
        return target


class _CheckedConnections(httpcore.AnyIOBackend):
    """Connections to addresses that were checked after their name was resolved.

    Args:
        named: hosts of the setting; an address among them is not checked.
    """

    def __init__(self, named: set[str]) -> None:
        self._named = named

    async def connect_tcp(
        self, host: str, port: int, *more: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        name = host.strip("[]").lower()
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not (name in self._named and addresses == [name]):
            _check_public(host, addresses)
        failure: Exception | None = None
        for address in addresses:
            try:
                return await super().connect_tcp(address, port, *more, **options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError(f"{host} has no address")


def _check_public(host: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        if not is_public(address):
            raise ImageFetchError(
                f"{host} is {address}, which is not public; to fetch from it all the same, the"
                " owner of the server names that very address in allow_image_urls"
            )


def is_public(address: str) -> bool:
    """Return False for an address of this machine, its network, or a special purpose."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast or getattr(found, "is_site_local", False):
        return False
    if not isinstance(found, ipaddress.IPv6Address):
        return True
    inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
    if found in _TRANSLATED:
        inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    return all(is_public(str(one)) for one in inner if one is not None)


async def _body(response: httpcore.Response, url: str, most: int) -> bytes:
    data = bytearray()
    async for piece in response.aiter_stream():
        data += piece
        if len(data) > most:
            raise ImageTooLargeError(
                f"{url[:200]} has more than {most >> 20} MiB, or pictures of the request have more"
                " together; send a smaller one"
            )
    return bytes(data)
