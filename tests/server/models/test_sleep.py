"""A server whose engine sleeps: what wakes it, what does not, and what it reports meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psutil
from prometheus_client.parser import text_string_to_metric_families
from support.runs.waiting import until

from appliance.engine.process.supervisor import EngineState
from appliance.events import Info
from appliance.server.dashboard.watcher import Watcher, server_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Running, Serve

SOON = {"idle_timeout": 0.05}


async def asleep(running: Running) -> None:
    engine = running.engine
    await until(lambda: engine.state is EngineState.ASLEEP and engine.pid is None)


async def samples(running: Running) -> dict[str, float]:
    text = (await running.http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_looking_neither_wakes_an_engine_nor_keeps_it_awake(serve: Serve) -> None:
    async with serve(server=SOON) as running:
        for look in range(2):  # while it is awake or falls asleep, and while it sleeps
            for path in ("/health", "/ready", "/v1/models", "/v1/models/echo", "/metrics"):
                assert (await running.http.get(path)).status_code == 200, (look, path)
            await asleep(running)
        assert (await running.http.get("/health")).json() == {"status": "asleep"}
        assert (await running.http.get("/ready")).json() == {"status": "ready"}
        found = await samples(running)
        assert found["appliance_engine_asleep"] == 1
        assert found["appliance_engine_up"] == 0
        assert found["appliance_engine_wakes_total"] == 0
        assert running.engine.state is EngineState.ASLEEP


async def test_a_request_wakes_the_engine_and_is_answered(serve: Serve) -> None:
    async with serve(server=SOON) as running:
        await asleep(running)
        answer = (await running.complete("abc", max_tokens=3)).json()
        assert answer["choices"][0]["text"] == "abc"
        await asleep(running)
        streams = await asyncio.gather(
            *(running.frames("/v1/completions", prompt="de", max_tokens=2) for _ in range(3))
        )
        assert all(lines[-1] == "[DONE]" for lines in streams)
        found = await samples(running)
        assert found["appliance_engine_wakes_total"] == 2
        assert found["appliance_engine_restarts_total"] == 0


async def test_what_needs_no_engine_is_answered_asleep(serve: Serve) -> None:
    async with serve(server=SOON) as running:
        await asleep(running)
        found = (await running.http.post("/tokenize", json={"prompt": "abc"})).json()
        assert found["count"] == 3
        refused = await running.complete("x" * 1000)
        assert refused.status_code == 400, "too long, which is known asleep"
        assert (await running.http.get("/api/ps")).json() == {"models": []}
        assert running.engine.state is EngineState.ASLEEP


async def test_the_tokenizer_s_processes_end_with_the_engine(
    serve: Serve, byte_tokenizer: Tokenizer
) -> None:
    before = set(psutil.Process().children())  # of other tests in this process
    async with serve(server=SOON) as running:
        byte_tokenizer.try_template()
        await running.chat("hi")
        await asleep(running)
        await until(lambda: set(psutil.Process().children()) <= before, "a worker lives on")
        assert (await running.chat("hi")).status_code == 200
        byte_tokenizer.close()


async def test_dashboards_are_told_what_was_assumed_of_a_tokenizer(
    serve: Serve, tokenizer_with: Callable[..., Tokenizer]
) -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    tokenizer.notes = ("the file names no rules",)
    async with serve(tokenizer=tokenizer) as running:
        assert server_info(running.state).notes == ("the file names no rules",)


async def test_dashboards_are_told_and_see_no_blocks(serve: Serve) -> None:
    async with serve(server=SOON) as running:
        await asleep(running)
        info = server_info(running.state)
        assert isinstance(info, Info)
        assert info.state == "asleep"
        assert info.num_blocks > 0
        from appliance.server.dashboard.block_feed import BlockFeed

        events = Watcher(running.server, BlockFeed(), "").poll()
        assert [type(event).__name__ for event in events] == ["Info", "Sequences", "Stats"]
