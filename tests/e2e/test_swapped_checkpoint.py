"""The file of a served model is truncated and restored while it is served."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.chaos]


def ask(server: Server) -> str:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_what_is_served_does_not_change_with_its_file(smollm2_gguf: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    shutil.copy(smollm2_gguf, weights)
    server = Server(tmp_path / "log", str(weights))
    try:
        before = ask(server)
        assert "Tokyo" in before
        os.truncate(weights, 4096)  # in place: a process that had mapped it would be killed
        assert ask(server) == before
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: "is no usable GGUF file" in server.log)
        assert server.client.get("/health").status_code == 503
        shutil.copy(smollm2_gguf, tmp_path / "whole")
        os.replace(tmp_path / "whole", weights)
        server.wait_until(lambda: server.client.get("/ready").status_code == 200)
        assert ask(server) == before
    finally:
        assert server.stop() == 0
