"""`appliance serve --replicas 2` as a person uses it, with the real default model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("replicas") / "log",
        str(smollm2_gguf), "--served-model-name", "small", "--device", "cpu",
        "--replicas", "2", "--max-model-len", "1024", "--threads", "2", "--kv-disk", "off",
    )  # fmt: skip
    yield server
    server.stop()


def ask(server: Server, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 16}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_it_says_what_it_serves_and_a_conversation_is_found_again(server: Server) -> None:
    assert "replicas   2" in server.log
    assert server.client.get("/health").json()["replicas"] == {"small": ["ready", "ready"]}
    talk = said("What is the capital of Japan?")
    for _ in range(3):
        answer = ask(server, talk)
        talk += [answer["choices"][0]["message"], *said("And which river flows there?")]
        usage = ask(server, talk)["usage"]
        seen = answer["usage"]["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= seen - 1


def test_one_that_is_killed_under_load_takes_no_request_with_it(server: Server) -> None:
    texts = [f"Count to {number}." for number in range(8)]
    expected = [ask(server, said(text))["choices"] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, said(text)) for text in texts]
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [one.result()["choices"] for one in asked] == expected
    assert server.client.get("/ready").status_code == 200
    server.wait_until(
        lambda: server.client.get("/health").json()["replicas"] == {"small": ["ready", "ready"]}
    )
    assert server.gauge("appliance_engine_restarts_total") == 1
