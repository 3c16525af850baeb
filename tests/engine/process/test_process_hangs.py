"""An engine process without progress is ended; one that computes is left alone."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest
from support.echo.echo_engine import BUSY, HANG, idle, request, running, tokens
from support.runs.waiting import LIMIT, until

from appliance.engine.process.supervisor import EngineState, SupervisionLimits
from appliance.engine.process.watchdog import LOOKS_TO_HANG, Verdict, Watch
from appliance.errors import EngineDiedError

HASTY = SupervisionLimits(hang_timeout=0.4, step_timeout=LIMIT, backoff=0.01)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_a_stopped_process_is_replaced(busy: bool) -> None:
    async with running("holds_at=20", HASTY) as client:
        stopped, generation = client.pid, client.generate(request(1, max_tokens=400))
        await anext(generation)
        if not busy:
            generation.close()
            await until(lambda: idle(client))
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: not client.responsive)
        if busy:
            with pytest.raises(EngineDiedError, match="was stopped"):
                async for _ in generation:
                    pass
            generation.close()
        await until(lambda: client.state is EngineState.READY and client.restarts == 1)
        assert client.responsive
        assert client.pid != stopped
        assert len(client.quarantine.strikes) == 0, "no request has done it"
        assert await tokens(client, request(1, max_tokens=2)) == [1, 1]


async def test_a_process_that_goes_on_in_time_is_kept() -> None:
    limits = SupervisionLimits(hang_timeout=40.0, step_timeout=300.0)  # checked every 5 s
    async with running("step_seconds=0.01", limits) as client:
        pid, generation = client.pid, client.generate(request(1, max_tokens=50))
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        os.kill(pid, signal.SIGCONT)
        assert sum([len(delta.token_ids) async for delta in generation]) == 50
        assert client.pid == pid


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """All verdicts of the supervision."""
    found: list[Verdict] = []
    look = Watch.look

    def noted(watch: Watch, **seen: Any) -> Verdict:
        found.append(look(watch, **seen))
        return found[-1]

    monkeypatch.setattr(Watch, "look", noted)
    return found


async def test_a_step_that_does_nothing_is_noticed(
    capfd: pytest.CaptureFixture[str], looks: list[Verdict]
) -> None:
    async with running("", HASTY) as client:
        await until(lambda: len(looks) > 2 * LOOKS_TO_HANG)
        assert client.restarts == 0, "idle is not hung"
        with pytest.raises(EngineDiedError, match="does nothing, with work to do"):
            await tokens(client, request(HANG))
    assert "in advance" in capfd.readouterr().err, "the stack of the hung step was dumped"


async def test_an_answer_that_is_not_read_is_no_work_of_the_engine(looks: list[Verdict]) -> None:
    async with running("", HASTY) as client:
        unread = client.generate(request(1, 2, max_tokens=3))
        await until(lambda: unread.backlog == 3)
        assert client.num_running == 1
        assert not client.is_busy()
        looks.clear()
        await until(lambda: len(looks) > 2 * LOOKS_TO_HANG)
        assert client.restarts == 0
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert not client.quarantine.strikes
        assert [delta.token_ids async for delta in unread] == [(1,), (2,), (1,)]
        unread.close()
        await until(lambda: client.stats.generation_tokens_total == 0)


async def test_a_step_that_computes_for_long_is_left_alone() -> None:
    async with running("busy_seconds=1", HASTY) as client:
        pid = client.pid
        assert await tokens(client, request(BUSY, max_tokens=1)) == [BUSY]
        assert client.pid == pid


@pytest.mark.parametrize("advances", [True, False])
async def test_a_step_that_computes_without_getting_anywhere_is_ended(advances: bool) -> None:
    limits = SupervisionLimits(hang_timeout=0.4, step_timeout=1.5, backoff=0.01)
    model = "busy_seconds=2.5 advances=1" if advances else "busy_seconds=1000"
    async with running(model, limits) as client:
        if advances:
            assert await tokens(client, request(BUSY, max_tokens=1)) == [BUSY]
            assert client.restarts == 0
            return
        with pytest.raises(EngineDiedError, match="without getting anywhere"):
            await tokens(client, request(BUSY, max_tokens=1))
