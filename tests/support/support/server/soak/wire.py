"""A cheap client: HTTP/1.1 over a socket that is reused, or abandoned in any state."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply.

    Attributes:
        status: of HTTP.
        body: all of it.
        first: seconds to the first byte of the body.
    """

    status: int
    body: bytes
    first: float


class Connection:
    """One connection to a server, opened on demand and reopened after it was closed.

    Args:
        url: http://HOST:PORT.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, unless connected."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        return self._streams

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def post(self, path: str, body: bytes | dict[str, Any]) -> Reply:
        """Send JSON, or a malformed body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, content)

    async def ask(self, method: str, path: str, content: bytes = b"") -> Reply:
        """Return the whole reply to a request; repeat it if the server had closed the connection.

        Raises:
            ConnectionError: there is no reply.
        """
        was_open = self._streams is not None
        try:
            return await self._exchange(_head(method, path, content) + content)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if not was_open:
                raise ConnectionError("the server closed the connection") from None
        return await self._exchange(_head(method, path, content) + content)

    async def begin(self, method: str, path: str, content: bytes, *, whole: bool = True) -> None:
        """Send a request, or its first half, and read nothing."""
        _, writer = await self.open()
        writer.write(_head(method, path, content))
        writer.write(content if whole else content[: len(content) // 2])
        await writer.drain()

    async def _exchange(self, request: bytes) -> Reply:
        reader, writer = await self.open()
        begin = time.perf_counter()
        writer.write(request)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        if headers.get("transfer-encoding") == "chunked":
            body, first = await _chunks(reader)
        else:
            length = int(headers.get("content-length", 0))
            body, first = await reader.readexactly(length), time.perf_counter()
        if headers.get("connection") == "close":
            self.close()
        return Reply(int(status.split()[1]), body, first - begin)


def _head(method: str, path: str, content: bytes) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()


async def _chunks(reader: asyncio.StreamReader) -> tuple[bytes, float]:
    """Read a chunked body, and note when its first byte arrived."""
    pieces, first = [], 0.0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
        first = first or time.perf_counter()
    await reader.readexactly(2)
    return b"".join(pieces), first
