"""A client that disconnects frees its blocks at once, whatever the engine is doing for it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.conftest import Running, Serve


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection that is aborted at the end; uvloop would wait for one left open by a failure."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        yield writer
    finally:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def posted(running: Running, **fields: Any) -> AsyncIterator[asyncio.StreamWriter]:
    """A request whose answer is left unread, and whose client disconnects at the end."""
    body = json.dumps({"max_tokens": 400, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with connected(running) as writer:
        writer.write(head.encode() + body)
        yield writer


@pytest.mark.parametrize("stream", [True, False])
async def test_in_the_queue_in_prefill_and_while_decoding(serve: Serve, stream: bool) -> None:
    async with serve("holds_at=200", max_num_seqs=1, max_num_batched_tokens=16) as running:
        engine = running.engine

        async with posted(running, prompt="a", stream=stream):
            await until(lambda: engine.stats.generation_tokens_total > 0)
            async with posted(running, prompt="b", stream=stream):
                await until(lambda: engine.num_waiting == 1)
            await until(lambda: engine.num_waiting == 0)
            assert engine.num_running == 1
        await until(running.idle)
        assert engine.stats.aborted_total == 2

        generated = engine.stats.generation_tokens_total
        async with posted(running, prompt="c" * 500, max_tokens=10, stream=stream):
            await until(lambda: engine.num_running == 1)
        await until(lambda: engine.stats.aborted_total == 3 and running.idle())
        assert engine.stats.generation_tokens_total == generated

        assert (await running.complete("x", max_tokens=2)).status_code == 200


async def test_a_client_that_leaves_at_its_last_token(serve: Serve) -> None:
    async with serve() as running:
        for turns in range(0, 40, 4):
            async with posted(running, prompt="a", max_tokens=1):
                for _ in range(turns):
                    await asyncio.sleep(0)
        await until(running.idle)
        assert (await running.complete("x", max_tokens=2)).status_code == 200


async def test_a_client_that_leaves_in_its_body(serve: Serve) -> None:
    async with serve() as running:
        async with connected(running) as writer:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            await writer.drain()
        assert (await running.complete("x", max_tokens=2)).status_code == 200
        await until(running.idle)


async def test_an_abort_storm(serve: Serve) -> None:
    async with serve("step_seconds=0.001", max_num_seqs=8, server={"max_queue": 1000}) as running:

        async def one(number: int) -> None:
            async with posted(running, prompt="abc", max_tokens=30, stream=number % 2 == 0):
                await until(lambda: running.engine.stats.steps_total >= number % 7 * 4)

        await asyncio.gather(*(one(number) for number in range(100)))
        await until(running.idle)
        answers = await asyncio.gather(*(running.complete("abc", max_tokens=5) for _ in range(10)))
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"abcab"}


async def test_a_client_that_never_reads_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("appliance.server.http.stream.STALL_SECONDS", 0.3)
    async with serve("num_blocks=20000", max_model_len=20_000) as running:
        # More than the buffers of both sides hold: 8 choices with 20 alternatives per token.
        much = {"n": 8, "logprobs": 20, "max_tokens": 19_000, "ignore_eos": True}
        async with posted(running, prompt="a", stream=True, **much) as writer:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: running.engine.num_running == 1)
            await until(lambda: running.engine.stats.aborted_total == 8 and running.idle())
            assert (await running.complete("x", max_tokens=2)).status_code == 200
