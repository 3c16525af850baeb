"""An engine process dies and another replaces it: who is served, informed and suspected."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from support.echo.echo_engine import DIE, idle, request, running, tokens
from support.runs.waiting import until

from appliance.engine.nouns.messages import Vocabulary
from appliance.engine.process import supervisor as supervising
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineDiedError, EngineError, EngineUnavailableError, QuarantinedError
from appliance.grammar import Grammar

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import StepReport


async def test_kill_fails_what_runs_and_serves_what_waits() -> None:
    async with running("holds_at=20", max_num_seqs=2) as client:
        first, second, third = (client.generate(request(n, max_tokens=19)) for n in (1, 2, 3))
        await anext(first)
        await anext(second)
        first_process = client.pid
        assert first_process is not None
        os.kill(first_process, signal.SIGKILL)
        for generation in (first, second):
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                async for _ in generation:
                    pass
            generation.close()
        assert client.state.value == "restarting"
        with pytest.raises(EngineError, match="restarting"):
            client.generate(request(4))
        assert sum([len(delta.token_ids) async for delta in third]) == 19
        assert client.state.value == "ready"
        assert client.reason == ""
        assert client.restarts == 1
        assert client.stats.generation_tokens_total <= 19, "the numbers are the new engine's"
        assert client.pid != first_process
        assert not psutil.pid_exists(first_process)


async def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    async with running("holds_at=20") as client:
        generation = client.generate(request(1, max_tokens=19))
        await anext(generation)
        assert client.pid is not None
        os.kill(client.pid, 40)  # a real-time signal
        with pytest.raises(EngineDiedError, match="signal 40"):
            async for _ in generation:
                pass
        generation.close()
        await until(lambda: client.state is EngineState.READY)


async def test_a_supervisor_that_fails_starts_another_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as client:
        supervisor, first = client.supervisor, client.pid
        assert first is not None

        def broken(error: object) -> None:
            supervisor.on_death = client.on_death
            raise ValueError("nobody thought of this")

        monkeypatch.setattr(supervisor, "on_death", broken)
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.state is EngineState.READY and client.pid != first)
        assert "supervising the engine failed" in caplog.text
        assert await tokens(client, request(5, max_tokens=1)) == [5]


async def test_each_process_is_told_the_vocabulary_before_its_first_grammar() -> None:
    async with running() as client:
        client.vocabulary = Vocabulary((b"a", b"b"), ())
        obeying: dict[str, Any] = {"grammar": Grammar.choice(["a"]), "max_tokens": 1}
        for _ in range(2):
            assert await tokens(client, request(5, **obeying)) == [5]
        first = client.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.state is EngineState.READY and client.pid != first)
        assert await tokens(client, request(6, **obeying)) == [6]


async def test_a_request_that_kills_engines_is_tried_by_itself_and_then_refused() -> None:
    async with running(max_num_seqs=4) as client:
        killer = request(DIE)
        again = msgspec.structs.replace(killer, request_id="again")
        third = msgspec.structs.replace(killer, request_id="third")
        other = request(1, 2, max_tokens=4)
        with pytest.raises(EngineDiedError):
            await tokens(client, killer)
        await until(lambda: client.state is EngineState.READY)
        assert client.restarts == 1, "it is known from its first step on, and not tried again"
        assert client.quarantined == 0
        with pytest.raises(EngineDiedError):
            await tokens(client, again)
        await until(lambda: client.state is EngineState.READY)
        assert client.restarts == 2
        assert client.quarantined == 1
        with pytest.raises(QuarantinedError, match="this request ends the engine"):
            client.generate(third)
        assert client.restarts == 2
        assert await tokens(client, other) == [1, 2, 1, 2]


async def test_who_was_there_at_a_death_comes_back_one_by_one() -> None:
    """A second death can then be blamed on one request, instead of on all that happen to run."""
    async with running("step_seconds=0.01", max_num_seqs=8) as client:
        innocent = [request(n, max_tokens=40) for n in (1, 2, 3)]
        streams = [client.generate(one) for one in innocent]
        for stream in streams:
            await anext(stream)
        with pytest.raises(EngineDiedError):
            await tokens(client, request(DIE))
        for stream in streams:
            with pytest.raises(EngineDiedError):
                async for _ in stream:
                    pass
            stream.close()
        await until(lambda: client.state is EngineState.READY)
        # All are sent again, the killer among the first.
        killer = asyncio.create_task(tokens(client, request(DIE)))
        await asyncio.sleep(0)
        back = [
            asyncio.create_task(
                tokens(client, msgspec.structs.replace(one, request_id=f"{one.request_id}-again"))
            )
            for one in innocent
        ]
        with pytest.raises(EngineDiedError):
            await killer
        for task in back:
            assert len(await task) == 40
        assert client.quarantined == 1
        assert client.restarts == 2
        assert client.trials.abandon() == ()
        assert client.trials.running is None
        assert not client.quarantine.strikes or client.quarantined == len(
            client.quarantine.strikes
        ), "who came to the end is no suspect any more"


async def test_a_suspect_that_gives_up_makes_way_for_the_next() -> None:
    async with running("holds_at=20", max_num_seqs=1) as client:
        first, second = request(1, max_tokens=400), request(2, max_tokens=3)
        for one in (first, second):
            client.quarantine.strike([one])
        trial = client.generate(first)
        held = client.generate(second)
        assert held in client.trials
        assert trial not in client.trials
        trial.close()
        assert sum([len(delta.token_ids) async for delta in held]) == 3
        held.close()
        waiting, gone = client.generate(first), client.generate(request(3))
        gone.close()
        waiting.close()
        await until(lambda: idle(client))


async def test_no_number_of_deaths_is_for_good() -> None:
    async with running() as client:
        for number in range(1, 7):
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state is not EngineState.READY)
            assert "SIGKILL" in client.reason
            with pytest.raises(EngineUnavailableError, match="restarting"):
                client.generate(request(1))
            await until(lambda: client.state is EngineState.READY)
            assert client.restarts == number
        assert await tokens(client, request(1, max_tokens=1)) == [1]


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    """It fails, for example, while the process before has not yet freed its memory."""
    obstacle = tmp_path / "obstacle"
    model = f"holds_at=20 refuses_while={obstacle}"
    async with running(model, max_num_seqs=1) as client:
        running_one, waiting = (
            client.generate(request(1, max_tokens=400)),
            client.generate(request(2)),
        )
        await anext(running_one)
        obstacle.touch()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for generation, kind in ((running_one, EngineDiedError), (waiting, EngineUnavailableError)):
            with pytest.raises(kind):
                async for _ in generation:
                    pass
            generation.close()
        await until(lambda: client.restarts >= 3)
        assert client.state.value == "restarting"
        assert "not free yet" in client.reason
        obstacle.unlink()
        await until(lambda: client.state is EngineState.READY)
        assert client.reason == ""
        assert await tokens(client, request(3, max_tokens=1)) == [3]


async def test_a_system_without_descriptors_is_only_a_reason_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as client:
        start, failures = subprocess.Popen, 0

        def no_more(*arguments: Any, **options: Any) -> Any:
            nonlocal failures
            failures += 1
            if failures <= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return start(*arguments, **options)

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(subprocess, "Popen", no_more)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 4 and client.state is EngineState.READY)
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) <= before + 1, "nothing is left of what failed"
        assert await tokens(client, request(1, max_tokens=1)) == [1]


async def test_a_report_that_cannot_be_taken_costs_a_process_and_not_the_supervision() -> None:
    async with running() as client:

        def fails(report: StepReport) -> None:
            client.supervisor.on_report = client.on_report
            raise ValueError("a bug in the client")

        await until(lambda: client.stats_time > 0)
        client.supervisor.on_report = fails
        with pytest.raises(EngineDiedError, match="a bug in the client"):
            await tokens(client, request(1, max_tokens=1))
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert await tokens(client, request(2, max_tokens=1)) == [2]


async def test_an_observer_that_fails_costs_nobody_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as client:
        heard: list[StepReport] = []

        def fails(report: StepReport) -> None:
            raise ValueError("a bug in an observer")

        client.observers += [fails, heard.append]
        assert await tokens(client, request(1, max_tokens=3)) == [1, 1, 1]
        await until(lambda: heard)
        assert (client.restarts, client.state) == (0, EngineState.READY)
        assert "a bug in an observer" in caplog.text


async def test_a_supervisor_whose_recovery_fails_fails_its_requests_and_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("holds_at=20") as client:
        told: list[Exception | None] = []
        supervisor, process = client.supervisor, client.pid
        monkeypatch.setattr(supervisor, "on_lost", told.append)
        generation = client.generate(request(1, max_tokens=400))
        await anext(generation)

        async def broken(*arguments: object) -> None:
            raise ValueError("nobody thought of this")

        monkeypatch.setattr(supervising, "sleep", broken)  # before each new start
        assert process is not None
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in generation:
                pass
        generation.close()
        await until(lambda: told)
        assert "nobody thought of this" in str(told)
        assert client.state is EngineState.FAILED
        with pytest.raises(EngineUnavailableError, match="failed"):
            client.generate(request(2))


async def test_sigterm_ends_the_process_in_order() -> None:
    async with running() as client:
        await tokens(client, request(1))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        await until(lambda: client.stats.steps_total == 0 and idle(client))
        assert await tokens(client, request(1, max_tokens=1)) == [1]
