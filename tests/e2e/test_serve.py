"""The appliance as a person uses it: real processes, the real default model, real clients."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from openai import APIError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from support.runs.waiting import LIMIT

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

pytestmark = pytest.mark.model

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of Japan?"}
]


@pytest.fixture
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_whole_and_streamed_alike(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(model="small", messages=QUESTION, temperature=0)
    stream = openai.chat.completions.create(
        model="small",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Tokyo" in text
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == whole.usage.prompt_tokens - 1, "the second time only the last token is run"


def test_the_start_says_where_and_how_memory_is_used(server: Server) -> None:
    for word in ("endpoint", "memory", "KV cache", "blocks of 16", "curl", "appliance top"):
        assert word in server.log
    assert "weights 4 bits (groups of 32), head 8 bits" in server.log
    assert "temperature 0.2, top_p 0.9, from the model's card" in server.log


def test_the_example_runs_as_it_is_printed(server: Server) -> None:
    example = re.search(r"^  try it +(.*)$", server.log, re.M)
    assert example is not None
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    said = subprocess.run(
        ["/bin/sh", "-c", example[1]], capture_output=True, check=True, timeout=300, cwd="/"
    )
    assert json.loads(said.stdout)["choices"][0]["message"]["content"]


def test_only_the_loopback_port_is_open(server: Server) -> None:
    sockets = set()
    for pid in (server.process.pid, server.engine_pid()):
        for table in ("tcp", "tcp6"):
            inodes = {
                os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").rstrip("]")
                for fd in os.listdir(f"/proc/{pid}/fd")
                if os.path.lexists(f"/proc/{pid}/fd/{fd}")
            }
            with open(f"/proc/{pid}/net/{table}") as rows:
                next(rows)
                for row in rows:
                    fields = row.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        sockets.add((fields[1].split(":")[0], int(fields[1].split(":")[1], 16)))
    assert sockets == {("0100007F", httpx.URL(server.url).port)}


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    body = {"model": "small", "prompt": "word " * 900, "max_tokens": 2000, "ignore_eos": True}
    for read_frames in (0, 3):
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as r:
            for _, line in zip(range(2 * read_frames), r.iter_lines(), strict=False):
                assert not line or line.startswith(("data: ", ": keep-alive"))
        server.wait_until(lambda: server.gauge("vllm:kv_cache_usage_perc") == 0)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=body, timeout=0.5)
    server.wait_until(lambda: server.gauge("vllm:kv_cache_usage_perc") == 0)


def test_an_idle_engine_uses_no_processor(server: Server) -> None:
    def seconds() -> float:
        stat = Path(f"/proc/{server.engine_pid()}/stat").read_text()
        fields = stat.rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    server.wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)

    def rests() -> bool:
        before = seconds()
        time.sleep(2.0)
        return seconds() - before <= 0.02

    server.wait_until(rests)


def test_kill_9_of_the_engine_ends_streams_with_an_error_and_waiting_ones_are_served(
    server: Server,
) -> None:
    """The last test of the module, since the engine is another process afterwards."""
    results = dict.fromkeys(range(8), "")

    def stream(number: int) -> None:
        body = {
            "model": "small",
            "prompt": f"Tale {number}:",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT) as r:
            for text in r.iter_text():
                results[number] += text

    threads = [threading.Thread(target=stream, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    # An answer that no client has seen yet would be started again from the beginning.
    server.wait_until(lambda: all("data: {" in text for text in results.values()))
    first = server.engine_pid()
    os.kill(first, signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT)
    for text in results.values():
        assert "[DONE]" not in text
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "SIGKILL" in last["error"]["message"]
    assert server.client.get("/health").status_code in (200, 503)
    server.wait_until(lambda: server.client.get("/health").status_code == 200)
    assert server.engine_pid() != first
    answer = server.client.post(
        "/v1/chat/completions", json={"model": "small", "messages": QUESTION, "temperature": 0}
    ).json()
    assert "Tokyo" in answer["choices"][0]["message"]["content"]
    assert server.gauge("appliance_engine_restarts_total") == 1


def test_the_openai_client_sees_errors_as_errors(openai: OpenAI) -> None:
    with pytest.raises(APIError, match="large"):
        openai.chat.completions.create(model="large", messages=QUESTION)
    with pytest.raises(APIError, match="8192"):
        openai.completions.create(model="small", prompt=[5] * 9000)
