"""No body blocks the event loop, on which all answers and `/health` depend.

The measure is the processor time of the loop's thread between two of its rounds, which other work
on the machine does not change. Requests, of up to a megabyte, are refused or answered.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Serve

MOST = 0.4  # seconds; 0.04 was the most measured, and a schema with 64 alternatives once took 5

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def bomb() -> dict[str, Any]:
    """A schema whose alternatives are slow to compare."""
    names = [f"{number:x}" for number in range(1000)]
    defs = {
        str(i): {
            "type": "object",
            "properties": {"k": {"const": str(i)}},
            "required": ["k", *names],
        }
        for i in range(64)
    }
    one = {"oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(64)]}
    return {"$defs": defs, "type": "object", "properties": {f"p{j}": one for j in range(9)}}


def small_bomb() -> dict[str, Any]:
    """The same within the limit on a schema's length."""
    schema = bomb()
    for part in schema["$defs"].values():
        del part["required"][100:]
    return schema


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": USER, "response_format": form}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "strict": True, "parameters": schema}
    return {"messages": USER, "tool_choice": "required"} | {
        "tools": [{"type": "function", "function": function}]
    }


MANY = 20_000
CALLS: list[Any] = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 8000},
    *[{"role": "tool", "content": "", "tool_name": "x"}] * 8000,
]  # fmt: skip
EMPTY: list[Any] = [{"type": "reasoning", "id": "r", "summary": []}] * MANY
FORMAT = {"type": "json_schema", "name": "x", "schema": bomb()}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a schema too long": (CHAT, formatted(bomb())),
    "a schema": (CHAT, formatted(small_bomb())),
    "a tool": (CHAT, tool(small_bomb())),
    "guided_json": ("/v1/completions", {"prompt": "hi", "guided_json": small_bomb()}),
    "guided_choice": ("/v1/completions", {"prompt": "hi", "guided_choice": ["ab"] * MANY}),
    "guided_regex": ("/v1/completions", {"prompt": "hi", "guided_regex": "(a|b)" * MANY}),
    "guided_grammar": ("/v1/completions", {"prompt": "hi", "guided_grammar": '"\\' * MANY}),
    "Ollama's format": ("/api/chat", {"model": "echo", "messages": USER, "format": bomb()}),
    "Ollama's calls": ("/api/chat", {"model": "echo", "messages": CALLS}),
    "Responses' format": ("/v1/responses", {"input": "hi", "text": {"format": FORMAT}}),
    "Responses' items": ("/v1/responses", {"input": [*EMPTY, *USER]}),
    "Responses' empty items": ("/v1/responses", {"input": [{}] * MANY}),
    "Messages' blocks": (
        "/v1/messages",
        {"model": "echo", "max_tokens": 4, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}
        ]},
    ),
    "messages": (CHAT, {"messages": USER * MANY}),
    "unknown fields": (CHAT, {"messages": USER} | {f"x{number}": 1 for number in range(MANY)}),
    "a text": ("/v1/completions", {"prompt": "ab " * 300_000}),
    "tokens": ("/v1/completions", {"prompt": [1] * 300_000}),
    "texts": ("/v1/embeddings", {"input": ["ab"] * MANY}),
    "documents": ("/v1/rerank", {"query": "a", "documents": ["ab"] * MANY}),
    "a text to count": ("/tokenize", {"prompt": "ab<|im_end|>" * MANY, "return_token_strs": True}),
    "tokens to write": ("/detokenize", {"tokens": [97] * 300_000}),
    "a name": (CHAT, {"messages": USER, "model": "m" * 10**6}),
    "stop strings": (CHAT, {"messages": USER, "stop": ["ab"] * MANY}),
    "biases": (CHAT, {"messages": USER, "logit_bias": {str(i): 1 for i in range(MANY)}}),
}  # fmt: skip


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


class Watch:
    """The most processor time that one round of the loop takes."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def run(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.worst = max(self.worst, time.thread_time() - before)


async def test_no_body_holds_up_the_loop(serve: Serve, tokenizer: Tokenizer) -> None:
    raw = {name: (path, json.dumps(body).encode()) for name, (path, body) in BODIES.items()}
    slow, wrong = {}, {}
    async with serve(tokenizer=tokenizer, max_model_len=4096) as running:
        await running.chat("hi", max_tokens=2)  # loads what the first request imports
        for name, (path, content) in raw.items():
            watch = Watch()
            watching = asyncio.create_task(watch.run())
            response = await running.http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            await asyncio.sleep(0)
            watching.cancel()
            if watch.worst > MOST:
                slow[name] = watch.worst
            if response.status_code >= 500:
                wrong[name] = (response.status_code, response.text[:200])
    assert not wrong
    assert not slow


FIRST = """
import json, threading
from appliance.server.http.body import decode_json, decoder_of
from appliance.server.requests.schema import ChatRequest

decoder_of(ChatRequest)
body = json.dumps({"messages": [{"role": "user", "content": "hi"}] * 20_000}).encode()
threads = [threading.Thread(target=decode_json, args=(body, ChatRequest)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_long_bodies_may_come_together() -> None:
    """Runs in a process of its own, which alone a crash would end."""
    ended = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
