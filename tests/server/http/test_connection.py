"""A connection with a clock and a transport of ours: what a stranger can hold, and how long."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from appliance.server.http.connection import (
    CHECK_SECONDS,
    HEADER_SECONDS,
    LINGER_SECONDS,
    STALL_SECONDS,
    HttpProtocol,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.server.conftest import Serve

KEEP_ALIVE = 30
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


@dataclass
class Timer:
    callback: Callable[..., object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """A loop whose time advances on request."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), timer))
        return timer

    def create_task(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.callback()
        self.now = end


@dataclass
class Wire:
    """A transport that records what was written, and whether it is open."""

    written: bytearray = field(default_factory=bytearray)
    unsent: int = 0
    closing: bool = False
    aborted: bool = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", self.written)]


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the body."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class House:
    """A server's connections."""

    def __init__(self, most: int = 100, app: Any = answer) -> None:
        self.clock = Clock()
        self.state = ServerState()
        self.config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE
        )
        self.config.load()
        self._most = most

    def connect(self) -> tuple[HttpProtocol, Wire]:
        protocol = HttpProtocol(
            config=self.config,
            server_state=self.state,
            app_state={},
            _loop=self.clock,
            max_connections=self._most,
        )
        wire = Wire()
        protocol.connection_made(wire)  # type: ignore[arg-type]
        return protocol, wire


async def test_a_connection_that_says_nothing_is_closed() -> None:
    house = House()
    _, wire = house.connect()
    house.clock.advance(HEADER_SECONDS - 1)
    assert not wire.closing
    house.clock.advance(1)
    assert wire.closing


async def test_bytes_one_by_one_win_no_time() -> None:
    house = House()
    protocol, wire = house.connect()
    for byte in GET[: int(HEADER_SECONDS)]:
        assert not wire.closing
        protocol.data_received(bytes([byte]))
        house.clock.advance(1)
    assert wire.closing


async def test_after_an_answer_a_head_that_has_begun_must_end() -> None:
    """A byte used to end uvicorn's keep-alive timeout, and no other timeout replaced it."""
    house = House()
    protocol, wire = house.connect()
    for _ in range(3):
        protocol.data_received(GET)
        await settle()
        house.clock.advance(KEEP_ALIVE - 1)
    assert wire.statuses == [200, 200, 200]
    assert not wire.closing
    for byte in GET[: int(HEADER_SECONDS)]:
        assert not wire.closing
        protocol.data_received(bytes([byte]))
        house.clock.advance(1)
    assert wire.closing


async def test_a_head_that_comes_with_the_request_before_must_end_too() -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(GET + GET[:5])
    await settle()
    assert wire.statuses == [200]
    house.clock.advance(HEADER_SECONDS)
    assert wire.closing


async def test_a_body_that_nobody_reads_does_not_hold_the_connection() -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(POST)
    await settle()
    assert wire.statuses == [200]
    for _ in range(int(LINGER_SECONDS)):
        assert not wire.closing
        protocol.data_received(b"x")
        house.clock.advance(1)
    assert wire.closing


async def test_a_body_that_ends_in_time_leaves_the_connection_open_and_watched() -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(POST)
    await settle()
    protocol.data_received(b"x" * 10)
    house.clock.advance(KEEP_ALIVE - 1)
    assert not wire.closing
    protocol.data_received(GET)
    await settle()
    assert wire.statuses == [200, 200]
    house.clock.advance(KEEP_ALIVE)
    assert wire.closing


async def test_a_request_that_is_being_answered_has_no_deadline_here() -> None:
    done = asyncio.Event()

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await done.wait()
        await answer(scope, receive, send)

    house = House(app=later)
    protocol, wire = house.connect()
    protocol.data_received(POST + b"x" * 10)
    await settle()
    house.clock.advance(3600)
    assert not wire.closing
    done.set()
    await settle()
    assert wire.statuses == [200]


async def test_an_answer_that_nobody_reads_is_given_up() -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(GET)
    await settle()
    wire.unsent = 10**6
    house.clock.advance(KEEP_ALIVE)
    assert wire.closing, "the keep-alive clock asks for it, but what is unsent keeps it open"
    house.clock.advance(STALL_SECONDS + CHECK_SECONDS)
    assert wire.aborted


async def test_a_slow_but_steady_reader_gets_its_answer() -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(GET)
    await settle()
    wire.unsent = 10**6
    while wire.unsent > 0:
        house.clock.advance(CHECK_SECONDS)
        wire.unsent -= 20_000
        assert not wire.aborted
    wire.unsent = 0
    house.clock.advance(3600)
    assert not wire.aborted


async def test_too_many_connections_end_the_one_that_was_idle_for_longest() -> None:
    house = House(most=3)
    first, first_wire = house.connect()
    house.clock.advance(1)
    _, second_wire = house.connect()
    house.clock.advance(1)
    first.data_received(GET)
    await settle()
    house.clock.advance(1)
    house.connect()
    _, newest_wire = house.connect()
    assert second_wire.closing, "it has said nothing since before the first one's answer"
    assert not first_wire.closing
    assert not newest_wire.closing
    assert newest_wire.statuses == []


async def test_where_all_connections_are_in_use_the_next_is_told_so() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    house = House(most=2, app=never)
    busy = [house.connect() for _ in range(2)]
    for protocol, _ in busy:
        protocol.data_received(GET)
    await settle()
    _, wire = house.connect()
    assert wire.statuses == [503]
    assert wire.closing
    head, _, body = bytes(wire.written).partition(b"\r\n\r\n")
    assert b"retry-after: 2" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert not any(one.closing for _, one in busy)
    for task in house.state.tasks:
        task.cancel()


async def test_connections_that_are_gone_are_not_counted() -> None:
    house = House(most=2)
    for _ in range(10):
        protocol, wire = house.connect()
        assert not wire.closing
        protocol.connection_lost(None)
        house.clock.advance(3600)  # no timeout of it is left to fire
        wire.closing = False
    assert house.state.connections == set()


NO_HTTP = [
    (b"GARBAGE\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000, 431),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
]


@pytest.mark.parametrize(("sent", "status"), NO_HTTP)
async def test_what_is_no_http_is_told_so_in_the_shape_of_all_errors(
    sent: bytes, status: int
) -> None:
    house = House()
    protocol, wire = house.connect()
    protocol.data_received(sent)
    assert wire.statuses == [status]
    assert wire.closing
    _, _, body = bytes(wire.written).partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    protocol.data_received(sent)  # more may follow
    assert wire.statuses == [status]


async def test_a_broken_body_after_the_answer_ends_the_connection_in_silence() -> None:
    house = House()
    protocol, wire = house.connect()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    protocol.data_received(head)
    await settle()
    protocol.data_received(b"no number\r\n")
    assert wire.statuses == [200]
    assert wire.closing


async def test_requests_to_speak_another_protocol_are_answered_without_a_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as running:
        upgrade = {"connection": "upgrade", "upgrade": "nonsense"}
        for _ in range(3):
            assert (await running.http.get("/health", headers=upgrade)).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
