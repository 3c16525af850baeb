from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from appliance.events import BlockRun, Delta, Snapshot, Stats
from appliance.tui import client
from appliance.tui.client import EventFeed
from appliance.tui.server import Server
from appliance.tui.state import ConnectionChange, ConnectionPhase, DashboardState, reduce
from tests.tui.conftest import CACHED, FREE, INFO, STATS, Answer, Ending, EventServer, snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from appliance.tui.state import FeedItem


class Follower:
    """Collects what a feed has published so far."""

    def __init__(self) -> None:
        self.items: list[FeedItem] = []
        self.state = DashboardState()

    def take(self, item: FeedItem) -> None:
        self.state = reduce(self.state, item)
        self.items.append(item)

    @property
    def connections(self) -> list[ConnectionChange]:
        return [item for item in self.items if isinstance(item, ConnectionChange)]

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not happened():  # noqa: ASYNC110  (any condition at all)
                await asyncio.sleep(0.005)

    async def failure(self) -> ConnectionChange:
        """The first failure."""
        await self.until(
            lambda: any(one.phase is not ConnectionPhase.LIVE for one in self.connections)
        )
        return next(one for one in self.connections if one.phase is not ConnectionPhase.LIVE)


@asynccontextmanager
async def follow(url: str, key: str | None = None) -> AsyncIterator[Follower]:
    follower = Follower()
    feed = EventFeed(Server.at(url, key), first_retry=0.01)
    task = asyncio.create_task(feed.follow(follower.take))
    try:
        yield follower
    finally:
        assert not task.done(), "the feed is followed whatever happens"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_events_arrive_in_order(event_server: EventServer) -> None:
    event_server.answers = [Answer((INFO, snapshot([FREE] * 4), STATS))]
    async with follow(event_server.url, "secret") as follower:
        await follower.until(lambda: follower.state.stats)
        event_server.send(Delta(epoch=1, runs=(BlockRun(1, 2, CACHED),)))
        await follower.until(lambda: len(follower.items) == 5)
    assert follower.items[0] == ConnectionChange(ConnectionPhase.LIVE)
    assert follower.items[1] == INFO
    assert follower.items[3] == STATS
    assert follower.state.blocks is not None
    assert follower.state.blocks.cells.tolist() == [FREE, CACHED, CACHED, FREE]
    head = event_server.requests[0].lower()
    assert head.startswith("get /admin/v1/events http/1.1")
    assert "authorization: bearer secret\r\n" in head
    assert "accept: text/event-stream\r\n" in head


async def test_without_a_key_none_is_sent(event_server: EventServer) -> None:
    event_server.answers = [Answer((INFO,))]
    async with follow(event_server.url) as follower:
        await follower.until(lambda: follower.state.info)
    assert "authorization" not in event_server.requests[0].lower()


@pytest.mark.parametrize(
    ("answer", "phase", "reason"),
    [
        (Answer(status="401 Unauthorized"), ConnectionPhase.NO_KEY, "set APPLIANCE_API_KEY"),
        (Answer(status="403 Forbidden"), ConnectionPhase.UNAUTHORIZED, "refused"),
        (
            Answer(status="404 Not Found", content_type="text/html"),
            ConnectionPhase.FOREIGN,
            "404 text/html",
        ),
        (Answer(content_type="text/html"), ConnectionPhase.FOREIGN, "200 text/html"),
        (Answer(status="503 Service Unavailable"), ConnectionPhase.LOST, "503 Service Unavailable"),
        (Answer(status="429 Too Many Requests"), ConnectionPhase.LOST, "429 Too Many Requests"),
        (Answer((INFO,), ending=Ending.FINISH), ConnectionPhase.LOST, "the feed ended"),
        (Answer((INFO,), ending=Ending.CUT), ConnectionPhase.LOST, "connection was cut"),
        (
            Answer((INFO,), b'event: stats\ndata: {"ti', Ending.FINISH),
            ConnectionPhase.LOST,
            "cut in the middle of a frame",
        ),
        (
            Answer((INFO,), b"event: stats\ndata: {}\n\n"),
            ConnectionPhase.LOST,
            "missing required field",
        ),
        (Answer((INFO,), b"event: stats\ndata: [\n\n"), ConnectionPhase.LOST, "cannot be read"),
        (Answer((INFO,), b"event: stats\ndata: \xff\n\n"), ConnectionPhase.LOST, "cannot be read"),
        (
            Answer((Snapshot(epoch=1, num_blocks=9, block_size=16, cells="AAAA"),)),
            ConnectionPhase.LOST,
            "do not decompress",
        ),
        (
            Answer((snapshot([FREE]), Delta(epoch=1, runs=(BlockRun(0, 9, FREE),)))),
            ConnectionPhase.LOST,
            "a map of 1 block",
        ),
    ],
)
async def test_what_goes_wrong_is_said_and_then_tried_again(
    event_server: EventServer, answer: Answer, phase: ConnectionPhase, reason: str
) -> None:
    event_server.answers = [answer, Answer((INFO, snapshot([CACHED] * 3)))]
    async with follow(event_server.url) as follower:
        failure = await follower.failure()
        assert failure.phase is phase
        assert reason in failure.reason
        assert failure.retry_at > 0
        await follower.until(
            lambda: follower.state.blocks and follower.state.blocks.num_blocks == 3
        )
        assert follower.state.connection.phase is ConnectionPhase.LIVE


async def test_a_key_that_is_wrong_is_told_from_none(event_server: EventServer) -> None:
    event_server.answers = [Answer(status="401 Unauthorized")]
    async with follow(event_server.url, "secret") as follower:
        failure = await follower.failure()
    assert failure.phase is ConnectionPhase.UNAUTHORIZED
    assert "the server refused the key; set APPLIANCE_API_KEY" in failure.reason


async def test_a_server_that_is_not_there(event_server: EventServer) -> None:
    await event_server.stop()
    async with follow(event_server.url) as follower:
        failure = await follower.failure()
        assert failure.phase is ConnectionPhase.LOST
        assert failure.reason == "connection refused; is the server running?"
        event_server.answers = [Answer((INFO, snapshot([FREE])))]
        await event_server.start()
        await follower.until(lambda: follower.state.current and follower.state.blocks)


async def test_a_server_that_speaks_no_http() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read(10)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with follow(f"http://127.0.0.1:{port}") as follower:
            failure = await follower.failure()
    assert failure.phase is ConnectionPhase.LOST
    assert failure.reason


async def test_a_server_that_falls_silent(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE_TIMEOUT", 0.05)
    event_server.answers = [Answer((INFO,))]
    async with follow(event_server.url) as follower:
        assert (await follower.failure()).reason.startswith("nothing came for")


async def test_events_of_another_version_are_skipped(event_server: EventServer) -> None:
    event_server.answers = [Answer((INFO,), b"event: weather\ndata: {}\n\n: comment\n\n")]
    async with follow(event_server.url) as follower:
        await follower.until(lambda: follower.state.info)
        event_server.send(STATS)
        await follower.until(lambda: follower.state.stats)
    assert [one.phase for one in follower.connections] == [ConnectionPhase.LIVE]


async def test_deltas_of_an_unknown_epoch_bring_a_new_snapshot(event_server: EventServer) -> None:
    stray = Delta(epoch=2, runs=(BlockRun(0, 1, CACHED),))
    event_server.answers = [
        Answer((snapshot([FREE] * 2, epoch=1), *[stray] * (client.MAX_STRAY_DELTAS + 1))),
        Answer((snapshot([CACHED] * 2, epoch=2),)),
    ]
    async with follow(event_server.url) as follower:
        failure = await follower.failure()
        assert failure.reason == "a snapshot of the blocks is missing"
        assert follower.state.blocks is not None
        assert follower.state.blocks.cells.tolist() == [FREE] * 2
        await follower.until(lambda: follower.state.blocks and follower.state.blocks.epoch == 2)


async def test_it_tries_less_often_until_it_succeeds(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def fast_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("appliance.tui.client.asyncio.sleep", fast_sleep)
    failing = Answer(status="500 Internal Server Error")
    event_server.answers = [
        *[failing] * 7,
        Answer((snapshot([FREE]),), ending=Ending.FINISH),
        failing,
    ]
    feed = EventFeed(Server.at(event_server.url, None))
    task = asyncio.create_task(feed.follow(lambda item: None))
    async with asyncio.timeout(10):
        while len(event_server.requests) < 10:
            await sleep(0.005)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert pauses[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 0.5, 1.0]


async def test_what_waited_on_the_way_is_dropped_with_its_connection(
    event_server: EventServer,
) -> None:
    def numbers(seconds_ago: float) -> Stats:
        return msgspec.structs.replace(STATS, time=time.time() - seconds_ago)

    event_server.answers = [Answer((INFO, snapshot([FREE] * 4), numbers(3600.0)))]
    async with follow(event_server.url) as follower:
        await follower.until(lambda: follower.state.stats)
        event_server.send(numbers(3605.0))
        await follower.until(lambda: len(follower.items) == 5)
        assert len(event_server.requests) == 1, "clocks may differ, and links be a little uneven"
        event_server.answers = [Answer((INFO, snapshot([CACHED] * 4), numbers(3600.0)))]
        event_server.send(numbers(3620.0))
        failure = await follower.failure()
        assert (failure.phase, failure.reason) == (ConnectionPhase.LOST, "a slow link: 20 s behind")
        await follower.until(
            lambda: follower.state.blocks and follower.state.blocks.counts().cached == 4
        )
        assert follower.state.connection.phase is ConnectionPhase.LIVE
        assert len(event_server.requests) == 2
