"""A real HTTP server on loopback that sends the event feed, or malformed answers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.server.block_cells import pack_cell

from appliance.events import NO_OWNER, Info, Quantiles, Sequences, Snapshot, Stats, encode_event
from appliance.stats import EngineStats, SequenceView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from appliance.events import Event

FREE = pack_cell(0, 0, 0, NO_OWNER)
CACHED = pack_cell(1, 0, 0, NO_OWNER)


def active(owner: int, references: int = 1) -> int:
    return pack_cell(2, 0, references, owner)


class Ending(Enum):
    """What happens to the connection once the prepared bytes are sent."""

    HOLD = "stays open for more"
    FINISH = "ends as HTTP wants it"
    CUT = "ends in the middle"


@dataclass(frozen=True)
class Answer:
    """How the server answers one request."""

    events: tuple[Event, ...] = ()
    tail: bytes = b""  # after the events
    ending: Ending = Ending.HOLD
    status: str = "200 OK"
    content_type: str = "text/event-stream"


@dataclass
class EventServer:
    """Gives each request the next answer, and repeats the last one."""

    answers: list[Answer] = field(default_factory=list)
    pages: dict[str, Answer] = field(default_factory=dict)  # answers of paths with their own
    requests: list[str] = field(default_factory=list)  # request line and headers
    port: int = 0
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _watching: set[asyncio.StreamWriter] = field(default_factory=set)  # those with an open stream
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Abort every connection, as the death of a process does."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        await asyncio.sleep(0.01)  # long enough for a connection just accepted to be registered
        while self._connections:
            for writer in self._connections:
                writer.transport.abort()
            await asyncio.sleep(0.01)
        await server.wait_closed()

    def send(self, *events: Event) -> None:
        """Send events to all open streams."""
        for writer in self._watching:
            writer.write(chunk(b"".join(map(encode_event, events))))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            await self._answer(reader, writer)
        finally:  # also if cancelled: an open socket would fail a later test
            self._watching.discard(writer)
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            path = self.requests[-1].split(" ")[1]
            if path in self.pages:
                answer = self.pages[path]
            elif len(self.answers) > 1:
                answer = self.answers.pop(0)
            else:
                answer = self.answers[0]
            head = (
                f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.content_type}\r\n"
                "Transfer-Encoding: chunked\r\n\r\n"
            )
            writer.write(head.encode())
            writer.write(chunk(b"".join(map(encode_event, answer.events)) + answer.tail))
            if answer.ending is Ending.FINISH:
                writer.write(b"0\r\n\r\n")
            await writer.drain()
            if answer.ending is Ending.HOLD:
                self._watching.add(writer)
                await reader.read()  # until the other side leaves


def page(content: bytes, status: str = "200 OK", kind: str = "application/json") -> Answer:
    """An answer that is not a feed."""
    return Answer((), content, Ending.FINISH, status, kind)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content) if content else b""


@pytest.fixture
async def event_server() -> AsyncIterator[EventServer]:
    server = EventServer()
    await server.start()
    yield server
    await server.stop()


def snapshot(cells: list[int], epoch: int = 1) -> Snapshot:
    return Snapshot.of(epoch, 16, np.array(cells, dtype="<u4").tobytes())


def sequence(slot: int, status: str = "running", **changes: object) -> SequenceView:
    fields = {
        "request_id": f"chatcmpl-{slot}",
        "index": 0,
        "slot": slot,
        "owner": "anna",
        "status": status,
        "prompt_tokens": 1234,
        "cached_tokens": 512,
        "output_tokens": 77,
        "blocks": 82,
        "age_seconds": 60.0 - slot,
    }
    return SequenceView(**(fields | changes))  # type: ignore[arg-type]


def sequences(*views: SequenceView) -> Sequences:
    return Sequences(sequences=views)


INFO = Info(
    version="0.1.0",
    model="SmolLM2-135M-Instruct",
    state="ready",
    device="cpu",
    weight_format="4-bit packed (g32)",
    kv_format="int8",
    context_length=8192,
    block_size=16,
    num_blocks=4096,
    max_num_seqs=32,
    kv_bytes=3 * 2**30,
    weight_bytes=2**27,
    precisions=("int8", "fp16"),
)
STATS = Stats(
    time=0.0,
    uptime_seconds=3725.0,
    engine=EngineStats(
        running=2,
        waiting=1,
        prefix_queries_total=1000,
        prefix_hits_total=713,
        preemptions_total=5,
        blocks_total=4096,
        blocks_active=1024,
        blocks_cached=512,
        blocks_free=2560,
        blocks_shared=64,
        block_size=16,
        kv_tokens=16000,
        step_prefill_tokens=384,
        step_decode_tokens=2,
        step_seconds=0.025,
        model_seconds=0.020,
    ),
    requests_running=2,
    requests_waiting=1,
    requests_finished=40,
    requests_failed=3,
    prompt_tokens_per_second=1234.5,
    generation_tokens_per_second=87.6,
    time_to_first_token=Quantiles(p50=0.182, p90=0.24, p99=1.5, count=9),
    inter_token_latency=Quantiles(p50=0.0221, p90=0.0287, p99=0.042, count=99),
)
