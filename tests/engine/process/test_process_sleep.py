"""An idle engine's process ends, and a request starts another."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest
from support.echo.echo_engine import ECHO, LIMITS, end_tokens, request, running, tokens
from support.runs.waiting import has_ended, until

from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineError
from appliance.stats import EngineStats


async def put_to_sleep(client: EngineClient) -> psutil.Process:
    """Let the engine fall asleep; return the process that has ended."""
    assert client.pid is not None
    process = psutil.Process(client.pid)
    client.sleep()
    await until(lambda: client.pid is None)
    assert client.state is EngineState.ASLEEP
    return process


async def test_nothing_is_left_of_a_process_that_sleeps_and_a_request_wakes_another() -> None:
    async with running() as client:
        assert await tokens(client, request(1, 2, max_tokens=2)) == [1, 2]
        process = await put_to_sleep(client)
        assert has_ended(process)
        assert client.stats == EngineStats()
        assert client.metadata is None
        assert client.info is not None, "what it can do is still known"
        assert await tokens(client, request(3, 4, max_tokens=2)) == [3, 4]
        assert client.state is EngineState.READY
        assert (client.wakes.number, client.restarts) == (1, 0)


async def test_an_engine_sleeps_after_its_last_request_and_not_before() -> None:
    client = EngineClient(EngineConfig(), command=ECHO, limits=LIMITS, idle_timeout=0.05)
    await client.start(end_tokens, lambda *progress: None)
    try:
        await until(lambda: client.state is EngineState.ASLEEP)
        # Longer than the timeout, so that only the requests can keep the engine awake.
        asked = [request(7, max_tokens=100, ignore_eos=True) for _ in range(3)]
        for answer in await asyncio.gather(*(tokens(client, one) for one in asked)):
            assert answer == [7] * 100
        assert client.wakes.number == 1
        await until(lambda: client.state is EngineState.ASLEEP)
    finally:
        await client.close()


async def test_an_engine_with_work_is_not_put_to_sleep() -> None:
    async with running("holds_at=3") as client:
        generation = client.generate(request(1))
        client.sleep()
        assert client.state is EngineState.READY
        generation.close()


async def test_a_request_that_comes_while_the_process_ends_is_served_by_the_next() -> None:
    async with running() as client:
        first = client.pid
        client.sleep()
        assert client.state is EngineState.ASLEEP
        assert await tokens(client, request(5, max_tokens=1)) == [5]
        assert client.pid != first


async def test_a_client_that_leaves_while_the_engine_wakes_leaves_nothing_behind() -> None:
    async with running() as client:
        await put_to_sleep(client)
        generation = client.generate(request(1, max_tokens=500, ignore_eos=True))
        generation.close()
        await until(lambda: client.state is EngineState.READY)
        assert client.num_waiting + client.num_running == 0
        assert await tokens(client, request(2, max_tokens=1)) == [2]


async def test_a_wake_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as client:
        await put_to_sleep(client)
        spawn, failures = EngineProcess.spawn, iter([EngineError("out of memory")])

        async def fails_once(command: Any) -> EngineProcess:
            if (error := next(failures, None)) is not None:
                raise error
            return await spawn(command)

        monkeypatch.setattr(EngineProcess, "spawn", fails_once)
        assert await tokens(client, request(6, max_tokens=1)) == [6]
        assert client.restarts == 1


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_server_can_stop_while_its_engine_sleeps_or_wakes(wakes: bool) -> None:
    before = set(psutil.Process().children())  # of other tests in this process
    async with running() as client:
        await put_to_sleep(client)
        if wakes:
            client.generate(request(1))
            await until(lambda: client.pid is not None)
        await client.close()
        assert client.state is EngineState.STOPPED
        assert set(psutil.Process().children()) <= before
