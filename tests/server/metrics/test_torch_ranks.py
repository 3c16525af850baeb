"""A model that is divided among torch ranks, behind the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import psutil
from support.models.sure_models import THREE_GROUPS, write_sure_model
from support.runs.waiting import until

from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import EngineState, SupervisionLimits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Serve


SIZES = {"vocab_size": 272, "max_position_embeddings": 4096}
RANKS: dict[str, Any] = {
    "command": ENGINE_COMMAND,
    "limits": SupervisionLimits(),
    "device": "cpu",
    "dtype": "float32",
    "kernels": "torch",
    "tensor_parallel": 2,
    "threads": 1,
    "kv_disk": "off",
    "kv_cache_memory": 1 << 24,
}


async def check_that_it_sleeps(rank: psutil.Process) -> None:
    """Check that it waits for rank 0's next order without polling."""
    begin, before = rank.num_ctx_switches(), sum(rank.cpu_times()[:2])
    await asyncio.sleep(1.0)
    assert rank.num_ctx_switches().voluntary - begin.voluntary <= 40
    assert sum(rank.cpu_times()[:2]) - before <= 2 / os.sysconf("SC_CLK_TCK")


async def test_a_rank_sleeps_while_idle_and_takes_the_engine_down_when_it_dies(
    serve: Serve, tmp_path: Path
) -> None:
    """One start serves both, as it imports torch twice; groups that recover are in tests/e2e."""
    write_sure_model("llama", tmp_path, **THREE_GROUPS | SIZES)
    async with serve(str(tmp_path), **RANKS) as running:
        engine = running.engine

        assert (await running.complete("abc", max_tokens=8)).status_code == 200
        assert engine.info is not None
        rank = psutil.Process(engine.info.ranks[1].pid)
        await check_that_it_sleeps(rank)
        begun = asyncio.Event()

        async def stream() -> list[str]:
            body = {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            found = []
            async with running.http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        found.append(line.removeprefix("data: "))
                        begun.set()
            return found

        streaming = asyncio.create_task(stream())
        await begun.wait()
        os.kill(rank.pid, signal.SIGKILL)
        lines = await streaming
        assert "[DONE]" not in lines
        assert json.loads(lines[-1])["error"]["code"] == "engine_unavailable"
        await until(lambda: engine.state is EngineState.RESTARTING)
        refused = await running.complete("abc", max_tokens=8)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert not psutil.pid_exists(rank.pid)
