"""Several dashboards, some behind slow links: each shows the present state, never a past one."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
from support.runs.waiting import LIMIT

from appliance.engine.process.client import EngineClient
from appliance.events import Delta, Event, Snapshot, decode_event
from appliance.server.dashboard.block_feed import cells_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest
    from numpy.typing import NDArray

    from tests.server.conftest import Running, Serve

NUM_BLOCKS = 2048
CHANGES = 200


class Dashboard:
    """A feed that is read only on request, so that it can also stay unread."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.bytes_read = 0
        self.epoch = 0
        self.cells: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    async def read(self) -> Event | None:
        """Process the next event."""
        name = b""
        while True:
            line = await self._reader.readline()
            assert line, "the feed ended"
            self.bytes_read += len(line)
            if line.startswith(b"event: "):
                name = line[7:].strip()
            elif line.startswith(b"data: "):
                break
        event = decode_event(name.decode(), line[6:])
        if isinstance(event, Snapshot):
            self.epoch = event.epoch
            self.cells = np.frombuffer(event.words(), dtype="<u4").copy()
        elif isinstance(event, Delta) and event.epoch == self.epoch:
            for run in event.runs:
                self.cells[run.start : run.start + run.length] = run.cell
        return event

    async def read_a_piece(self) -> None:
        """Read the first bytes of a snapshot."""
        while not (await self._reader.readline()).startswith(b"event: snapshot"):
            pass
        assert len(await self._reader.readexactly(100)) == 100

    async def read_until(self, cells: NDArray[np.uint32]) -> None:
        """Read until the map is this one."""
        async with asyncio.timeout(LIMIT):
            while not np.array_equal(self.cells, cells):
                await self.read()


@asynccontextmanager
async def dashboard(running: Running) -> AsyncIterator[Dashboard]:
    """A dashboard whose own buffers are as small as possible."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**15)
    writer.write(f"GET /admin/v1/events HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    try:
        yield Dashboard(reader)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


class Churn:
    """A block map that changes in every place at once, so that each change is a snapshot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = np.random.default_rng(1)
        self._words = np.zeros(NUM_BLOCKS, dtype=np.uint64)
        view = memoryview(self._words.data)
        monkeypatch.setattr(EngineClient, "metadata", property(lambda client: view))
        monkeypatch.setattr("appliance.server.dashboard.watcher.TICK_SECONDS", 0.005)

    @property
    def truth(self) -> NDArray[np.uint32]:
        """The map that a dashboard should show."""
        return cells_of(self._words)

    def change(self) -> None:
        """Change every block."""
        self._words[:] = self._random.integers(1, 2**64, NUM_BLOCKS, dtype=np.uint64)


async def test_a_dashboard_that_does_not_keep_up_gets_what_is_and_never_a_queue(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serve() as running,
        dashboard(running) as slow,
        dashboard(running) as quick,
        dashboard(running) as other,
    ):
        churn = Churn(monkeypatch)
        churn.change()
        for each in (slow, quick, other):
            await each.read_until(churn.truth)
        before = slow.bytes_read
        for _ in range(CHANGES):
            churn.change()
            await quick.read_until(churn.truth)  # a slow one does not delay the others
        await other.read_until(churn.truth)
        await slow.read_until(churn.truth)
        snapshot = quick.bytes_read / (CHANGES + 1)
        # Buffers on the way hold some hundred thousand bytes, not three million.
        assert (slow.bytes_read - before) / snapshot < 20


async def test_one_that_leaves_in_the_middle_of_a_frame_disturbs_no_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as running, dashboard(running) as stays:
        churn = Churn(monkeypatch)
        for _ in range(10):
            churn.change()
            async with dashboard(running) as leaves:
                await leaves.read_a_piece()
            await stays.read_until(churn.truth)
