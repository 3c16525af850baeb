"""Requests of a running server, seen and ended from outside, each with the keys that allow it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.runs.waiting import LIMIT, until

from appliance.events import (
    BlockTable,
    Info,
    Sequences,
)
from appliance.stats import SequenceView
from tests.server.watching import watch

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

HANG = 267  # of the echo engine: the step never ends


async def test_a_block_table_says_where_a_sequence_lies(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        work = asyncio.create_task(running.complete("a" * 40, max_tokens=300))
        engine = running.engine
        await until(lambda: any(view.slot for view in engine.sequences))
        (view,) = engine.sequences
        path = f"/admin/v1/sequences/{view.request_id}/0/blocks"
        response = await running.http.get(path)
        table = msgspec.json.decode(response.content, type=BlockTable)
        assert (table.request_id, table.index) == (view.request_id, 0)
        assert len(table.blocks) >= table.num_tokens / 16
        assert [len(entry.hash) for entry in table.blocks[:2]] == [32, 32]
        assert {entry.references for entry in table.blocks} == {1}
        answers = await asyncio.gather(*(running.http.get(path) for _ in range(3)))
        assert {answer.status_code for answer in answers} == {200}, "several may ask at once"
        for gone in (f"{view.request_id}/1", f"{view.request_id}/x", "no-such-request/0"):
            response = await running.http.get(f"/admin/v1/sequences/{gone}/blocks")
            assert response.status_code == 404
            assert "sequence" in response.json()["error"]["message"]
        work.cancel()


async def test_a_block_table_that_never_comes_ends_with_the_engine(serve: Serve) -> None:
    async with serve() as running:
        engine = running.engine
        work = asyncio.create_task(running.complete([HANG]))
        await until(lambda: engine.num_running + engine.num_waiting == 1)
        ((request, _),) = engine.open_requests()
        path = f"/admin/v1/sequences/{request.request_id}/0/blocks"
        asked = asyncio.create_task(running.http.get(path))
        await until(lambda: bool(engine.tables))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert (await asked).status_code == 404
        work.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_can_be_ended_from_outside(serve: Serve, stream: bool) -> None:
    async with serve("step_seconds=0.01") as running:
        engine = running.engine
        work = asyncio.create_task(running.complete("a" * 40, max_tokens=400, stream=stream))
        await until(lambda: bool(engine.num_running))
        ((request, _),) = engine.open_requests()
        path = f"/admin/v1/requests/{request.request_id}/abort"
        response = await running.http.post(path)
        assert (response.status_code, response.json()) == (200, {"aborted": True})
        answer = await work
        assert answer.status_code == (200 if stream else 410)
        assert '"code":"request_aborted"' in answer.text
        await until(running.idle)
        assert (await running.http.post(path)).status_code == 404


async def test_prompts_are_shown_where_the_server_was_started_to_show_them(serve: Serve) -> None:
    async with serve("step_seconds=0.01", server={"show_prompts": True}) as running:
        feed = watch(running)
        work = asyncio.create_task(running.complete("hello there", max_tokens=300))
        async with asyncio.timeout(LIMIT):
            async for event in feed:
                if isinstance(event, Info):
                    assert event.prompts_shown
                if isinstance(event, Sequences) and event.sequences:
                    assert event.sequences[0].prompt == "hello there"
                    break
        work.cancel()
        await feed.aclose()


KEYS = {"anna": "key-of-anna", "codex": "key-of-codex"}


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("bare", [True, False])
async def test_of_several_keys_each_manages_its_own_requests(serve: Serve, bare: bool) -> None:
    """The key without a name manages all requests."""
    server = {"api_keys": KEYS, "show_prompts": True, "api_key": "bare-key" if bare else None}
    async with serve("step_seconds=0.01", server=server) as running:
        headers = bearing(KEYS["anna"])
        body = {"prompt": "a" * 40, "max_tokens": 400}
        work = asyncio.create_task(running.http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: bool(running.engine.sequences))
        ((request, _),) = running.engine.open_requests()
        abort = f"/admin/v1/requests/{request.request_id}/abort"
        table = f"/admin/v1/sequences/{request.request_id}/0/blocks"
        for key in ("key-of-codex", *(("bare-key",) if bare else ()), "key-of-anna"):
            running.http.headers.update(bearing(key))
            allowed = key != "key-of-codex"
            views = await first_sequences(running)
            assert [view.owner for view in views] == ["anna"], "everybody sees that it runs"
            assert views[0].prompt_tokens == 40
            assert views[0].prompt == ("a" * 40 if allowed else "")
            assert views[0].yours is allowed
            entries = msgspec.json.decode((await running.http.get(table)).content, type=BlockTable)
            assert len(entries.blocks) > 1
            assert bool(entries.blocks[0].hash) is allowed
            if key == "key-of-anna" or not allowed:
                response = await running.http.post(abort)
                assert response.status_code == (200 if allowed else 403)
        running.http.headers.update(bearing("key-of-codex"))
        assert (await running.http.post(abort)).status_code == 404, "it has ended"
        assert (await work).status_code == 410


async def test_the_key_without_a_name_ends_requests_of_others(serve: Serve) -> None:
    async with serve(
        "step_seconds=0.01",
        server={"api_keys": KEYS, "api_key": "bare-key"},
        headers=bearing(KEYS["anna"]),
    ) as running:
        work = asyncio.create_task(running.complete("a" * 40, max_tokens=400))
        await until(lambda: bool(running.engine.num_running))
        ((request, _),) = running.engine.open_requests()
        path = f"/admin/v1/requests/{request.request_id}/abort"
        response = await running.http.post(path, headers=bearing("key-of-codex"))
        assert response.status_code == 403
        assert "'anna'" in response.json()["error"]["message"]
        response = await running.http.post(path, headers=bearing("bare-key"))
        assert response.status_code == 200
        assert (await work).status_code == 410


async def test_the_only_key_manages_everything(serve: Serve) -> None:
    server = {"api_keys": {"anna": KEYS["anna"]}}
    async with serve(server=server) as running:
        assert running.server.may_manage("anna", "whoever asked before a restart")


async def first_sequences(running: Running) -> tuple[SequenceView, ...]:
    feed = watch(running)
    try:
        async with asyncio.timeout(LIMIT):
            async for event in feed:
                if isinstance(event, Sequences) and event.sequences:
                    return event.sequences
    finally:
        await feed.aclose()
    raise AssertionError("the feed ended")
