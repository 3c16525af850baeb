"""An engine process starts, cannot start, or loses its parent while it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.echo.echo_engine import ECHO, end_tokens
from support.runs.waiting import has_ended, until, wait_until

from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
from appliance.engine.process.supervisor import EngineState
from appliance.engine.process.worker import keep_compiled_kernels
from appliance.errors import EngineDiedError, EngineError, MemoryPlanError, ModelError


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
        await client.start(end_tokens, lambda stage, done, total: None)
    assert caught.value.exit_code == exit_code  # type: ignore[attr-defined]
    assert client.state is EngineState.FAILED
    await client.close()


async def test_a_process_that_talks_nonsense_is_refused() -> None:
    code = "import sys, os; os.write(int(sys.argv[2]), b'HTTP/1.1 200 OK')"
    client = EngineClient(EngineConfig(), command=(sys.executable, "-c", code))
    with pytest.raises(EngineError, match="bytes"):
        await client.start(end_tokens, lambda stage, done, total: None)


async def test_ending_while_it_loads_leaves_nothing() -> None:
    client = EngineClient(EngineConfig(model="slow_load"), command=ECHO)
    told: list[tuple[str, int, int]] = []
    start = asyncio.create_task(client.start(end_tokens, lambda *progress: told.append(progress)))
    await until(lambda: bool(told))
    assert client.pid is not None
    process = psutil.Process(client.pid)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not process.is_running()


async def test_weights_are_read_before_the_tokens_that_end_an_answer_are_known() -> None:
    client = EngineClient(EngineConfig(), command=ECHO)
    told: list[tuple[str, int, int]] = []

    async def fails() -> tuple[int, ...]:
        assert told[-1] == ("reading weights", 2, 2)
        raise ModelError("the tokenizer is damaged")

    with pytest.raises(ModelError, match="the tokenizer is damaged"):
        await client.start(fails, lambda *progress: told.append(progress))
    assert client.pid is None


async def test_ending_while_it_is_started_leaves_nothing() -> None:
    before = set(psutil.Process().children())
    start = asyncio.create_task(EngineProcess.spawn(ECHO))
    await asyncio.sleep(0)
    (process,) = set(psutil.Process().children()) - before
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not process.is_running()


PARENT = """
import asyncio, sys, time
from appliance.config import EngineConfig
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.client import EngineClient
async def end_tokens():
    return (1,)
async def main():
    client = EngineClient(EngineConfig(model=sys.argv[2]), command=(sys.executable, sys.argv[1]))
    told = asyncio.Event()
    start = asyncio.create_task(client.start(end_tokens, lambda *progress: told.set()))
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


def test_compiled_kernels_are_kept_with_the_other_derived_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere/else"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
