from __future__ import annotations

import asyncio
import os
import threading

import pytest
from support.runs.waiting import LIMIT

from appliance.config import EngineConfig
from appliance.engine.process.client import EngineClient
from appliance.events import Gpu
from appliance.server.metrics import machine
from appliance.server.metrics.gpu import GpuProbe
from appliance.server.metrics.machine import MachineProbe


class SlowProbe(GpuProbe):
    """A driver that answers only when allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.reads = 0

    def read(self, generated_tokens: int) -> tuple[Gpu, ...]:
        self.reads += 1
        assert self.let.wait(LIMIT)
        return (Gpu(name="slow"),)


@pytest.fixture
def engine() -> EngineClient:
    return EngineClient(EngineConfig())  # never started


async def test_this_process_is_counted_and_one_that_is_not_there_is_not(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PATIENCE_SECONDS", LIMIT)
    found = await MachineProbe(lambda: [engine]).read()
    assert found is not None
    assert found.api_rss_bytes > 2**20
    assert found.api_cpu_seconds > 0
    assert (found.engine_rss_bytes, found.engine_cpu_seconds) == (0, 0.0)
    assert found.cpu_cores == len(os.sched_getaffinity(0))
    assert 0 < found.memory_available_bytes < found.memory_total_bytes


async def test_many_who_ask_at_once_are_told_the_same(engine: EngineClient) -> None:
    gpus = SlowProbe()
    gpus.let.set()
    probe = MachineProbe(lambda: [engine], gpus)
    found = await asyncio.gather(*(probe.read() for _ in range(5)))
    assert all(one is found[0] for one in found)
    assert gpus.reads == 1


async def test_a_driver_that_hangs_keeps_nobody_waiting_for_long(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PATIENCE_SECONDS", 0.05)
    gpus = SlowProbe()
    probe = MachineProbe(lambda: [engine], gpus)
    async with asyncio.timeout(LIMIT):
        assert await probe.read() is None
        assert await probe.read() is None
    assert gpus.reads == 1, "it is not asked again before it has answered"
    gpus.let.set()
    async with asyncio.timeout(LIMIT):
        while (found := await probe.read()) is None:
            pass
    assert [gpu.name for gpu in found.gpus] == ["slow"]
