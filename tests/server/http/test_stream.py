"""A stream alone: what it sends when, to a client that reads as the test wants."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs.waiting import LIMIT, until

from appliance.server.http.connection import CHUNKS
from appliance.server.http.frames import FrameTemplate, data_frame
from appliance.server.http.stream import EventStream
from appliance.server.openai.answers import ChatChunk, ChatChunkChoice, ChatDelta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from starlette.types import Message


class Client:
    """Receives messages; while `reading` is cleared it receives nothing."""

    def __init__(self, *, chunks: bool = False) -> None:
        self.reading = asyncio.Event()
        self.reading.set()
        self.gone = asyncio.Event()
        self.offered = asyncio.Event()  # set when something was sent while it did not read
        self.sent: list[bytes] = []
        self.past: list[bytes] = []  # the part of `sent` that was written past the middlewares
        self.closed = 0
        extensions = {CHUNKS: self._chunk} if chunks else {}
        self._scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/x"}
        self._scope["extensions"] = extensions

    async def listen(self, frames: AsyncGenerator[bytes, None], *, gzip: bool = False) -> None:
        stream = EventStream(frames, holds=self._counting(), gzip=gzip)
        await stream(self._scope, self._receive, self._send)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.closed += 1

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self.reading.is_set():
            self.offered.set()
        await self.reading.wait()
        self.sent.append(message.get("body", b"start"))

    def _chunk(self, piece: bytes) -> bool:
        if self.reading.is_set():
            self.sent.append(piece)
            self.past.append(piece)
        else:
            self.offered.set()
        return self.reading.is_set()


async def frames_of(*steps: bytes | Callable[[], Any]) -> AsyncGenerator[bytes, None]:
    """Yield frames; call what lies between them, and await the result."""
    for step in steps:
        if isinstance(step, bytes):
            yield step
        elif (result := step()) is not None:
            await result


@given(before=st.text(max_size=5), text=st.text(max_size=20))
def test_a_filled_template_is_the_encoded_frame(before: str, text: str) -> None:
    def frame(content: str) -> bytes:
        choice = ChatChunkChoice(0, ChatDelta(content=content))
        return data_frame(
            ChatChunk(id="i", created=1, model=before, choices=[choice], system_fingerprint="f")
        )

    assert FrameTemplate(frame(FrameTemplate.MARK)).fill(text) == frame(text)


@pytest.mark.parametrize("chunks", [False, True])
async def test_frames_come_in_order_and_once(chunks: bool) -> None:
    client = Client(chunks=chunks)
    await client.listen(frames_of(b"1", b"2", lambda: asyncio.sleep(0), b"3"))
    assert client.sent == [b"start", b"1", b"2", b"3", b""]
    assert client.past == ([b"2", b"3"] if chunks else []), "the first begins the response"
    assert client.closed == 1


@pytest.mark.parametrize("chunks", [False, True])
async def test_a_client_that_reads_again_gets_everything(chunks: bool) -> None:
    client = Client(chunks=chunks)
    listening = asyncio.create_task(client.listen(frames_of(b"1", client.reading.clear, b"2")))
    await client.offered.wait()
    assert client.sent == [b"start", b"1"]
    client.reading.set()
    await listening
    assert client.sent == [b"start", b"1", b"2", b""]


@pytest.mark.parametrize("chunks", [False, True])
async def test_a_frame_waits_for_a_comment_that_waits_for_the_client(
    chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.server.http.stream.KEEP_ALIVE_SECONDS", 0.02)
    client = Client(chunks=chunks)

    async def pause() -> None:
        client.reading.clear()
        await client.offered.wait()
        paused.set()

    paused = asyncio.Event()
    listening = asyncio.create_task(client.listen(frames_of(b"1", pause, b"2")))
    await paused.wait()
    await asyncio.sleep(0)
    assert client.sent == [b"start", b"1"]
    client.reading.set()
    await listening
    assert client.sent == [b"start", b"1", b": keep-alive\n\n", b"2", b""]


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("silent", [False, True])
async def test_a_client_that_stops_reading_is_given_up(
    chunks: bool, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client stops in the middle of a frame, or of a comment."""
    monkeypatch.setattr("appliance.server.http.stream.STALL_SECONDS", 0.05)
    monkeypatch.setattr("appliance.server.http.stream.KEEP_ALIVE_SECONDS", 0.02)
    client = Client(chunks=chunks)
    never = asyncio.Event()
    rest = never.wait if silent else (lambda: None)
    async with asyncio.timeout(LIMIT):
        await client.listen(frames_of(b"1", client.reading.clear, rest, b"2"))
    assert client.sent == [b"start", b"1"]
    assert client.closed == 1


async def test_an_error_has_a_status_before_the_first_frame_and_a_frame_after_it() -> None:
    def fail() -> None:
        raise ValueError("a bug")

    early, late = Client(), Client(chunks=True)
    await early.listen(frames_of(fail))
    assert early.sent[0] == b"start"
    assert json.loads(early.sent[1])["error"]["code"] == "internal_error"
    await late.listen(frames_of(b"1", b"2", fail))
    assert late.sent[:3] == [b"start", b"1", b"2"]
    assert json.loads(late.sent[3].removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert len(late.sent) == 4
    assert early.closed == late.closed == 1


async def test_what_is_compressed_can_be_read_frame_by_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes comments and errors, which do not come with the frames."""
    monkeypatch.setattr("appliance.server.http.stream.KEEP_ALIVE_SECONDS", 0.02)

    def fail() -> None:
        raise ValueError("a bug")

    client = Client(chunks=True)
    frames = frames_of(b"1" * 99, lambda: until(lambda: len(client.sent) > 2), b"2" * 99, fail)
    await client.listen(frames, gzip=True)
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    first, *comments, second, error = [unpacker.decompress(piece) for piece in client.sent[1:]]
    assert (first, second) == (b"1" * 99, b"2" * 99)
    assert set(comments) == {b": keep-alive\n\n"}
    assert b"internal_error" in error
    assert unpacker.eof
    assert not client.past, "all goes one way"


async def test_a_client_that_goes_away_ends_the_stream() -> None:
    client = Client()
    never = asyncio.Event()
    listening = asyncio.create_task(client.listen(frames_of(b"1", never.wait, b"2")))
    await until(lambda: len(client.sent) == 2)
    client.gone.set()
    await listening
    assert client.sent == [b"start", b"1"]
    assert client.closed == 1
