"""The bytes on the wire."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import LIMIT

from appliance.server.dashboard.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from tests.server.conftest import Running, Serve


@asynccontextmanager
async def connection(
    running: Running,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = running.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(LIMIT):
            yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def request(version: str, prompt: str, **fields: object) -> bytes:
    body = json.dumps({"prompt": prompt, "stream": True, **fields}).encode()
    return (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def text_of(frames: bytes) -> str:
    data = [frame.removeprefix(b"data: ") for frame in frames.split(b"\n\n") if frame]
    assert data[-1] == b"[DONE]"
    return "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1])


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_streams_follow_each_other_on_one_connection(serve: Serve) -> None:
    async with serve("step_seconds=0.001") as running, connection(running) as (reader, writer):
        for prompt in ("é" * 3, "x", "abc"):
            writer.write(request("1.1", prompt, max_tokens=12))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert head.lower().count(b"transfer-encoding: chunked") == 1
            text = text_of(await read_chunks(reader))
            assert text == (prompt * 12).encode()[:12].decode()


async def test_requests_that_come_early_are_answered_in_turn(serve: Serve) -> None:
    async with serve("step_seconds=0.001") as running, connection(running) as (reader, writer):
        writer.write(b"".join(request("1.1", prompt, max_tokens=9) for prompt in "abc"))
        for prompt in "abc":
            await reader.readuntil(b"\r\n\r\n")
            assert text_of(await read_chunks(reader)) == prompt * 9


async def test_an_old_client_gets_the_frames_bare(serve: Serve) -> None:
    async with serve("step_seconds=0.001") as running, connection(running) as (reader, writer):
        writer.write(request("1.0", "abc", max_tokens=7))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head.lower()
        assert text_of(await reader.read()) == "abcabca"


async def test_a_frame_of_no_bytes_ends_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frames(watcher: Watcher) -> AsyncGenerator[bytes, None]:
        for frame in (b"a", b"", b"b", b"", b"c"):
            yield frame

    monkeypatch.setattr(Watcher, "frames", frames)
    async with serve() as running, connection(running) as (reader, writer):
        writer.write(b"GET /admin/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await read_chunks(reader) == b"abc"
