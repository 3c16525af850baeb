"""The engine process under supervision, with an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from waiting import LIMIT, has_ended, until, wait_until

from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
from appliance.engine.process.generation import MAX_BACKLOG
from appliance.engine.process.supervisor import EngineState, SupervisionLimits
from appliance.engine.process.watch import LOOKS_TO_HANG, Verdict, Watch
from appliance.engine.request import Request, SamplingParams
from appliance.errors import (
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    MemoryPlanError,
    QuarantinedError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from appliance.engine.messages import StepReport

ECHO = (sys.executable, str(Path(__file__).parent / "echo_worker.py"))
EOS = 256
DIE, REFUSE, BREAK, HANG, FAIL, BUSY = 264, 265, 266, 267, 268, 269  # see echo_worker.py
LIMITS = SupervisionLimits(step_timeout=LIMIT, backoff=0.01)
ids = itertools.count()


@asynccontextmanager
async def running(
    model: str = "", limits: SupervisionLimits = LIMITS, **config: Any
) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(model=model, **config), command=ECHO, limits=limits)
    await client.start((EOS,), lambda stage, done, total: None)
    try:
        yield client
    finally:
        await client.close()


def request(*prompt: int, **sampling: Any) -> Request:
    return Request(
        request_id=f"r{next(ids)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
    )


async def tokens(client: EngineClient, asked: Request) -> list[int]:
    found: list[int] = []
    async with aclosing(client.generate(asked)) as deltas:
        async for delta in deltas:
            found += delta.token_ids
    return found


def idle(client: EngineClient) -> bool:
    stats = client.stats
    return stats.running == stats.waiting == stats.blocks_active == 0 and not any(
        client.metadata or [1]
    )


async def test_deltas_progress_info_and_block_metadata() -> None:
    seen: list[tuple[str, int, int]] = []
    client = EngineClient(EngineConfig(model="step_seconds=0.005"), command=ECHO)
    info = await client.start((EOS,), lambda *progress: seen.append(progress))
    try:
        assert seen == [("reading weights", 1, 2), ("reading weights", 2, 2)]
        assert client.state is EngineState.READY
        assert client.info == info
        assert info.eos_token_ids == (EOS,)
        assert client.metadata is not None
        assert len(client.metadata) == info.num_blocks
        async with aclosing(client.generate(request(5, 6, 7, max_tokens=4))) as deltas:
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
        await queued.aclose()
        await decoding.aclose()
        await until(lambda: idle(client))
        prefilling = client.generate(request(*[3] * 400))
        await until(lambda: client.num_running == 1)
        await prefilling.aclose()
        await until(lambda: client.stats.aborted_total == 3 and idle(client))
        assert client.stats.steps_total > steps
        assert client.stats.prompt_tokens_total == 401  # the queued one was never looked at


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
        await generation.aclose()
        assert generation.ready() is None


async def test_one_choice_ends_and_the_other_goes_on() -> None:
    async with running("step_seconds=0.005") as client:
        found: dict[int, int] = {0: 0, 1: 0}
        async with aclosing(client.generate(request(1, 2, n=2, max_tokens=20))) as deltas:
            async for delta in deltas:
                found[delta.index] += 1
                if delta.index == 0:
                    deltas.close_choice(0)
        assert found == {0: 1, 1: 20}
        await until(lambda: idle(client))
        assert client.stats.generation_tokens_total < 30


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
            await generation.aclose()
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
    """So that the second death is one request's, and not that of all who happen to run."""
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
            await stream.aclose()
        await until(lambda: client.state is EngineState.READY)
        # All come again, the killer among the first.
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
        assert not client._held
        assert client._on_trial is None
        assert not client._quarantine._strikes or client.quarantined == len(
            client._quarantine._strikes
        ), "who came to the end is no suspect any more"


async def test_a_suspect_that_gives_up_makes_way_for_the_next() -> None:
    async with running("holds_at=20", max_num_seqs=1) as client:
        first, second = request(1, max_tokens=400), request(2, max_tokens=3)
        for one in (first, second):
            client._quarantine.strike([one])
        trial = client.generate(first)
        held = client.generate(second)
        assert list(client._held) == [held]
        await trial.aclose()
        assert sum([len(delta.token_ids) async for delta in held]) == 3
        await held.aclose()
        waiting, gone = client.generate(first), client.generate(request(3))
        await gone.aclose()
        await waiting.aclose()
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
    """Such as for memory that the process before has not given back yet."""
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
            await generation.aclose()
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
        spawn, failures = asyncio.create_subprocess_exec, 0

        async def no_more(*arguments: Any, **options: Any) -> Any:
            nonlocal failures
            failures += 1
            if failures <= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return await spawn(*arguments, **options)

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(asyncio, "create_subprocess_exec", no_more)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 4 and client.state is EngineState.READY)
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) <= before + 1, "nothing is left of what failed"
        assert await tokens(client, request(1, max_tokens=1)) == [1]


async def test_a_report_that_cannot_be_taken_costs_a_process_and_not_the_supervision() -> None:
    async with running() as client:

        def fails(report: StepReport) -> None:
            client.observers.remove(fails)
            raise ValueError("a bug in an observer")

        await until(lambda: client.stats_time > 0)
        client.observers.append(fails)
        assert await tokens(client, request(1, max_tokens=1)) == [1]
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert await tokens(client, request(2, max_tokens=1)) == [2]


async def test_sigterm_ends_the_process_in_order() -> None:
    async with running() as client:
        await tokens(client, request(1))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        await until(lambda: client.stats.steps_total == 0 and idle(client))
        assert await tokens(client, request(1, max_tokens=1)) == [1]


HASTY = SupervisionLimits(hang_timeout=0.4, step_timeout=LIMIT, backoff=0.01)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_a_stopped_process_is_replaced(busy: bool) -> None:
    async with running("holds_at=20", HASTY) as client:
        stopped, generation = client.pid, client.generate(request(1, max_tokens=400))
        await anext(generation)
        if not busy:
            await generation.aclose()
            await until(lambda: idle(client))
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: not client.responsive)
        if busy:
            with pytest.raises(EngineDiedError, match="was stopped"):
                async for _ in generation:
                    pass
            await generation.aclose()
        await until(lambda: client.state is EngineState.READY and client.restarts == 1)
        assert client.responsive
        assert client.pid != stopped
        assert len(client._quarantine._strikes) == 0, "no request has done it"
        assert await tokens(client, request(1, max_tokens=2)) == [1, 1]


async def test_a_process_that_goes_on_in_time_is_kept() -> None:
    limits = SupervisionLimits(hang_timeout=40.0, step_timeout=300.0)  # a look every 5 s
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
    """All that the supervision finds."""
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
        assert not client._is_busy()
        looks.clear()
        await until(lambda: len(looks) > 2 * LOOKS_TO_HANG)
        assert client.restarts == 0
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert not client._quarantine._strikes
        assert [delta.token_ids async for delta in unread] == [(1,), (2,), (1,)]
        await unread.aclose()
        await until(lambda: client.stats.generation_tokens_total == 0)


async def test_a_step_that_computes_for_long_is_left_alone() -> None:
    async with running("busy_seconds=1.5", HASTY) as client:
        pid = client.pid
        assert await tokens(client, request(BUSY, max_tokens=1)) == [BUSY]
        assert client.pid == pid


@pytest.mark.parametrize("advances", [True, False])
async def test_a_step_that_computes_without_getting_anywhere_is_ended(advances: bool) -> None:
    limits = SupervisionLimits(hang_timeout=0.4, step_timeout=0.6, backoff=0.01)
    model = "busy_seconds=2 advances=1" if advances else "busy_seconds=1000"
    async with running(model, limits) as client:
        if advances:
            assert await tokens(client, request(BUSY, max_tokens=1)) == [BUSY]
            assert client.restarts == 0
            return
        with pytest.raises(EngineDiedError, match="without getting anywhere"):
            await tokens(client, request(BUSY, max_tokens=1))


@pytest.mark.parametrize(
    ("model", "kind", "exit_code", "text"),
    [
        ("does_not_fit", MemoryPlanError, 4, "needs 9 GiB"),
        ("breaks", EngineError, 6, "a bug"),
        ("dies", EngineDiedError, 6, "exited with code 7"),
    ],
)
async def test_what_cannot_start_says_why(
    model: str, kind: type[Exception], exit_code: int, text: str
) -> None:
    client = EngineClient(EngineConfig(model=model), command=ECHO)
    with pytest.raises(kind, match=text) as caught:
        await client.start((EOS,), lambda stage, done, total: None)
    assert caught.value.exit_code == exit_code  # type: ignore[attr-defined]
    assert client.state is EngineState.FAILED
    await client.close()


async def test_a_process_that_talks_nonsense_is_refused() -> None:
    code = "import sys, os; os.write(int(sys.argv[2]), b'HTTP/1.1 200 OK')"
    client = EngineClient(EngineConfig(), command=(sys.executable, "-c", code))
    with pytest.raises(EngineError, match="bytes"):
        await client.start((EOS,), lambda stage, done, total: None)


async def test_ending_while_it_loads_leaves_nothing() -> None:
    client = EngineClient(EngineConfig(model="slow_load"), command=ECHO)
    told: list[tuple[str, int, int]] = []
    start = asyncio.create_task(client.start((EOS,), lambda *progress: told.append(progress)))
    await until(lambda: bool(told))
    assert client.pid is not None
    process = psutil.Process(client.pid)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not process.is_running()


PARENT = """
import asyncio, sys, time
from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
async def main():
    client = EngineClient(EngineConfig(model=sys.argv[2]), command=(sys.executable, sys.argv[1]))
    told = asyncio.Event()
    start = asyncio.create_task(client.start((1,), lambda *progress: told.set()))
    await (told.wait() if sys.argv[2] else start)
    print(client.pid, flush=True)
    time.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("model", ["", "slow_load"])
def test_the_engine_does_not_outlive_its_parent(model: str) -> None:
    command = [sys.executable, "-c", PARENT, ECHO[1], model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        assert not has_ended(engine)
        parent.kill()
    wait_until(lambda: has_ended(engine))


async def test_compiled_kernels_are_kept_with_the_other_derived_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    told = tmp_path / "told"
    code = f"import os; open({str(told)!r}, 'w').write(os.environ['TRITON_CACHE_DIR'])"

    async def folder() -> str:
        process = await EngineProcess.spawn((sys.executable, "-c", code))
        assert await process.wait() == "exited with code 0"
        return told.read_text()

    assert await folder() == str(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    assert await folder() == "/somewhere/else"
