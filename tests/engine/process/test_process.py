"""The engine process under supervision, with an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing
from unittest.mock import MagicMock

import psutil
import pytest
from support.echo.echo_engine import (
    BREAK,
    ECHO,
    EOS,
    FAIL,
    REFUSE,
    end_tokens,
    idle,
    request,
    running,
    tokens,
)
from support.runs.waiting import until

from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
from appliance.engine.process.generation import MAX_BACKLOG
from appliance.engine.process.launch import create_metadata, map_metadata
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineDiedError, EngineError, RequestError


async def test_deltas_progress_info_and_block_metadata() -> None:
    seen: list[tuple[str, int, int]] = []
    client = EngineClient(EngineConfig(model="step_seconds=0.005"), command=ECHO)
    info = await client.start(end_tokens, lambda *progress: seen.append(progress))
    try:
        assert seen == [("reading weights", 1, 2), ("reading weights", 2, 2)]
        assert client.state is EngineState.READY
        assert client.info == info
        assert info.eos_token_ids == (EOS,)
        assert client.metadata is not None
        assert len(client.metadata) == info.num_blocks
        with closing(client.generate(request(5, 6, 7, max_tokens=4))) as deltas:
            found = [await anext(deltas)]
            assert any(client.metadata), "the running sequence owns a block"
            found += [delta async for delta in deltas]
        assert [delta.token_ids for delta in found] == [(5,), (6,), (7,), (5,)]
        assert found[0].queue_seconds is not None
        await until(lambda: client.stats.generation_tokens_total == 4 and idle(client))
    finally:
        await client.close()
    assert client.state.value == "stopped"


async def test_nobody_listens_on_the_network() -> None:
    async with running() as client:
        assert client.pid is not None
        engine = psutil.Process(client.pid)
        assert engine.net_connections(kind="inet") == []
        assert engine.children() == []
        mine = psutil.Process().net_connections(kind="inet")
        assert [c for c in mine if c.status == psutil.CONN_LISTEN] == []


async def test_an_idle_engine_uses_no_processor_time() -> None:
    async with running() as client:
        await tokens(client, request(1))
        await until(lambda: client.stats.generation_tokens_total == 8 and idle(client))
        assert client.pid is not None
        engine = psutil.Process(client.pid)

        async def rests() -> bool:
            before, switches = engine.cpu_times(), engine.num_ctx_switches().voluntary
            await asyncio.sleep(0.5)
            after = engine.cpu_times()
            used = after.user + after.system - before.user - before.system
            return used <= 0.01 and engine.num_ctx_switches().voluntary - switches <= 2

        await until(rests, "half a second without work")


async def test_one_bad_request_does_not_touch_the_others() -> None:
    async with running("step_seconds=0.005") as client:
        good = [asyncio.create_task(tokens(client, request(1, 2, 3))) for _ in range(3)]
        with pytest.raises(RequestError, match="refused at the engine's door"):
            await tokens(client, request(REFUSE))
        with pytest.raises(EngineError, match="broken by this request"):
            await tokens(client, request(BREAK, n=3))
        with pytest.raises(EngineError, match="no valid token"):
            await tokens(client, request(FAIL))
        for task in good:
            assert await task == [1, 2, 3, 1, 2, 3, 1, 2]
        await until(lambda: idle(client))
        assert client.restarts == 0


async def test_closing_early_frees_blocks_queued_in_prefill_and_decoding() -> None:
    async with running("holds_at=100", max_num_seqs=1, max_num_batched_tokens=16) as client:
        decoding = client.generate(request(1, max_tokens=500))
        await anext(decoding)
        queued = client.generate(request(2))
        await until(lambda: client.num_running == 1 and client.num_waiting == 1)
        steps = client.stats.steps_total
        queued.close()
        decoding.close()
        await until(lambda: idle(client))
        prefilling = client.generate(request(*[3] * 400))
        await until(lambda: client.num_running == 1)
        prefilling.close()
        await until(lambda: client.stats.aborted_total == 3 and idle(client))
        assert client.stats.steps_total > steps
        assert client.stats.prompt_tokens_total == 401  # the engine never saw the queued one


async def test_a_consumer_that_does_not_keep_up_is_given_up() -> None:
    async with running("num_blocks=20000") as client:
        generation = client.generate(request(1, n=8, max_tokens=10_000))
        await until(lambda: client.num_running == 0 and client.stats.aborted_total == 8)
        assert generation.backlog < 2 * MAX_BACKLOG
        with pytest.raises(EngineError, match="too slowly"):
            async for _ in generation:
                pass
        assert await tokens(client, request(1, max_tokens=2)) == [1, 1]


async def test_a_consumer_catches_up_without_waiting_and_sees_errors_last() -> None:
    async with running("holds_at=100") as client:
        generation = client.generate(request(1, 2, 3, max_tokens=500))
        await until(lambda: generation.backlog >= 5)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state is not EngineState.READY)
        found = [await anext(generation)]
        while (delta := generation.ready()) is not None:
            found.append(delta)
        assert [delta.token_ids[0] for delta in found[:5]] == [1, 2, 3, 1, 2]
        assert generation.backlog == 0
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await anext(generation)
        generation.close()
        assert generation.ready() is None


async def test_one_choice_ends_and_the_other_goes_on() -> None:
    async with running("step_seconds=0.005") as client:
        found: dict[int, int] = {0: 0, 1: 0}
        with closing(client.generate(request(1, 2, n=2, max_tokens=20))) as deltas:
            async for delta in deltas:
                found[delta.index] += 1
                if delta.index == 0:
                    deltas.close_choice(0)
        assert found == {0: 1, 1: 20}
        await until(lambda: idle(client))
        assert client.stats.generation_tokens_total < 30


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_as_the_process_ends_is_not_lost(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closed at that moment would wait for its supervisor forever."""
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def exit_code(_: object) -> int:
        return await exited

    monkeypatch.setattr(asyncio, "to_thread", exit_code)
    metadata = map_metadata(create_metadata(), writable=False)
    process = EngineProcess(MagicMock(), MagicMock(), metadata)
    waiting = asyncio.create_task(process.wait())
    for _ in range(4):
        await asyncio.sleep(0)
    exited.set_result(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert await waiting == "exited with code 0"
