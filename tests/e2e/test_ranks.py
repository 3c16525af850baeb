"""A server of several ranks as a person uses it, with the real default model."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.model

IDLE_SECONDS = 1.0
IDLE_SHARE = 0.02  # share of a core


NOTES = {
    "--tensor-parallel": "2 processes divide the model 1:1, heads 6:3",
    "--pipeline-parallel": "2 processes run the model's layers in turn",
}


@pytest.fixture(scope="module", params=NOTES)
def server(
    request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("ranks") / "log",
        str(smollm2_gguf), "--served-model-name", "small", "--device", "cpu",
        request.param, "2", "--max-model-len", "1024", "--threads", "2",
    )  # fmt: skip
    yield server
    server.stop()


def ranks(server: Server) -> list[psutil.Process]:
    """Return the processes, besides the engine's own, that hold a part of the model."""
    children = psutil.Process(server.engine_pid()).children()
    return [child for child in children if "appliance.engine.ranks" in child.cmdline()]


def wait_for_another_engine(server: Server, pid: int) -> None:
    def is_there() -> bool:
        with contextlib.suppress(StopIteration, OSError):
            return server.engine_pid() != pid
        return False

    server.wait_until(is_there)
    server.wait_until(lambda: server.client.get("/ready").status_code == 200)


def ask(server: Server, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_it_answers_and_says_how_the_model_is_divided(server: Server) -> None:
    assert any(note in server.log for note in NOTES.values())
    first = ask(server, "What is the capital of Japan?")
    assert "Tokyo" in first["choices"][0]["message"]["content"]
    again = ask(server, "What is the capital of Japan?")
    assert again["choices"] == first["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["prompt_tokens"] - 1


def test_an_idle_rank_sleeps(server: Server) -> None:
    (rank,) = ranks(server)
    ask(server, "Say hello.")
    begin, before = time.monotonic(), sum(rank.cpu_times()[:2])
    time.sleep(IDLE_SECONDS)
    spent = sum(rank.cpu_times()[:2]) - before
    assert spent <= max(IDLE_SHARE * (time.monotonic() - begin), 1 / os.sysconf("SC_CLK_TCK"))


def test_a_rank_that_is_killed_takes_the_group_down_and_back(server: Server) -> None:
    engine, (rank,) = server.engine_pid(), ranks(server)
    expected = ask(server, "Name a colour.")["choices"]
    os.kill(rank.pid, signal.SIGKILL)
    wait_for_another_engine(server, engine)
    assert f"process {rank.pid}, which has a part of the model, has ended" in server.log
    assert ask(server, "Name a colour.")["choices"] == expected
    assert [process.pid for process in ranks(server)] != [rank.pid]


def test_no_rank_outlives_the_engine(server: Server) -> None:
    """The last test of a server, since it does not wait for the next engine."""
    (rank,) = ranks(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_until(lambda: not psutil.pid_exists(rank.pid))
