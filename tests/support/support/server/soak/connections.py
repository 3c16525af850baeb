"""Connections that clients never close, and more of them than the server may open files."""

from __future__ import annotations

import asyncio
import resource
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from support.runs.waiting import until
from support.server.soak.server import Server, SoakError
from support.server.soak.wire import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEADS = (b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: x")
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def many(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    """Connections that are closed at the end; those that are not accepted are left out."""
    connections = [Connection(server.url) for _ in range(count)]
    try:
        await asyncio.gather(*(one.open() for one in connections), return_exceptions=True)
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def half_open(server: Server, *, count: int) -> dict[str, int]:
    """Connections that send nothing, or half a head: later clients must be answered nevertheless.

    Raises:
        SoakError: the server is not as before.
    """
    async with many(server, count) as connections:
        for number, connection in enumerate(connections):
            _, writer = await connection.open()
            writer.write(HEADS[number % len(HEADS)])
        await server.check()
    await server.check()
    return {"connections": count}


async def slowloris(server: Server, *, count: int, limit: float) -> dict[str, int]:
    """Send a byte now and then, before the first request and after it: the server must close all.

    Args:
        server: under test.
        count: of connections.
        limit: seconds after which none may be open.

    Raises:
        SoakError: one is still open, or the server is not as before.
    """

    async def drip(connection: Connection, before: bytes) -> bool:
        """Whether the server closed the connection."""
        reader, writer = await connection.open()
        writer.write(before)
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        while loop.time() < end and not writer.is_closing():
            writer.write(b"G")
            try:
                async with asyncio.timeout(limit / 100):
                    while await reader.read(4096):
                        pass
                return True
            except TimeoutError:
                continue
            except ConnectionError:
                return True
        return False

    async with many(server, count) as connections:
        drips = [drip(one, (b"", GET)[n % 2]) for n, one in enumerate(connections)]
        ended = await asyncio.gather(*drips)
        await server.check()
    if not all(ended):
        raise SoakError(f"{ended.count(False)} connections are open after {limit:.0f} s")
    return {"ended": len(ended)}


async def out_of_files(server: Server, *, count: int, spare: int = 20) -> dict[str, int]:
    """Open more connections than the server may have files: it must answer again after they close.

    Args:
        server: under test.
        count: of connections.
        spare: files that it may still open.

    Raises:
        SoakError: the server is not as before.
    """
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    most = server.process.num_fds() + spare
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        async with many(server, count):
            for _ in range(3000):  # a busy server accepts them later
                if server.process.num_fds() >= most:
                    break
                await asyncio.sleep(0.01)
            else:
                raise SoakError("the files did not run out")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    async def is_answered() -> bool:
        """False while the server closes the connections for which it had no file."""
        with suppress(ConnectionError):
            await server.metrics()
            return True
        return False

    await until(is_answered, "the server has files again and answers nobody")
    await server.check()
    return {"connections": count, "files": most}
