"""Chats that try to stall the server, and hostile templates and tokenizers."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from appliance.tokenizer import Tokenizer, isolation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.server.conftest import Serve

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"
BETWEEN_SECONDS = 0.05  # between two looks at a server


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def call(arguments: Any, call_id: str = "1") -> dict[str, Any]:
    """The messages of a chat with short texts and a tool call with these arguments."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}


async def test_deep_tool_calls_are_the_clients_mistake(serve: Serve) -> None:
    async with serve() as running:
        for depth in (70, 300, 480):
            answer = await running.http.post(CHAT, json=call(nested(depth)))
            assert answer.status_code == 400, depth
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert "nested more than 64 deep" in error["message"]
        answer = await running.http.post(CHAT, json=call(nested(20)) | {"max_tokens": 2})
        assert answer.status_code == 200


async def test_every_chat_is_rendered_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the length of `content` was checked, while 2 MiB can lie in other fields."""
    threads = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Sequence[Any], **options: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    async with serve() as running:
        for body in (call("", "x" * 10**6), call(""), {"messages": [{"role": "user"}] * 2}):
            answer = await running.http.post(CHAT, json=body | {"max_tokens": 2})
            assert answer.status_code == 200, answer.text
    assert len(threads) == 3
    assert threading.get_ident() not in threads


async def test_messages_are_bounded_by_their_bytes_and_not_by_their_number(serve: Serve) -> None:
    async with serve("num_blocks=8000", max_model_len=40_000) as running:
        messages = [{"role": "user", "content": "a"}] * 1000
        answer = await running.http.post(CHAT, json={"messages": messages, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        too_many = {"messages": messages * 100}
        assert (await running.http.post(CHAT, json=too_many)).status_code == 413


BOMB = (
    "{% if 'bomb' in messages[0].content %}{% for i in range(90000) %}"
    "{% set x = ('a' * 60000) | replace('a', 'aa') %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


async def test_a_template_that_takes_without_end_costs_its_own_request(
    serve: Serve, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "CPU_SECONDS", 1.0)
    tokenizer = Tokenizer.from_path(with_template(tokenizer_folder, BOMB))
    await asyncio.to_thread(tokenizer.try_template)
    async with serve(tokenizer=tokenizer) as running:
        bomb = asyncio.create_task(running.chat("a bomb"))
        while not bomb.done():
            assert (await running.http.get("/health")).status_code == 200
            assert (await running.complete("ab", max_tokens=2)).status_code == 200
            await asyncio.sleep(BETWEEN_SECONDS)
        refused = bomb.result()
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "chat_template_failed"
        assert "needs more than 1 s" in refused.json()["error"]["message"]
        answer = await running.chat("hello", max_tokens=3)
        assert answer.json()["choices"][0]["message"]["content"] == "hel"
    tokenizer.close()


async def test_rules_of_a_stranger_do_not_hold_the_event_loop(
    serve: Serve, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "ENCODE_SECONDS", 1.0)
    folder = with_template(tokenizer_folder, BOMB)
    content = json.loads((folder / "tokenizer.json").read_text())
    rule = {"type": "Split", "pattern": {"Regex": r"[a-z]*[b-y]*[a-w]*\d"}, "invert": False,
            "behavior": "Isolated"}  # fmt: skip
    both = {"type": "Sequence", "pretokenizers": [rule, content["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": both}))
    tokenizer = await asyncio.to_thread(Tokenizer.from_path, folder)
    async with serve(tokenizer=tokenizer, max_model_len=8000) as running:
        bomb = asyncio.create_task(running.complete("c" * 3000))  # short: it was encoded at once
        while not bomb.done():
            assert (await running.http.get("/health")).status_code == 200
            await asyncio.sleep(BETWEEN_SECONDS)
        assert bomb.result().status_code == 400
        assert "takes too long" in bomb.result().json()["error"]["message"]
        assert (await running.complete("ab", max_tokens=2)).status_code == 200
    tokenizer.close()


def with_template(folder: Path, template: str) -> Path:
    """A copy of a tokenizer with another chat template."""
    copy = folder.parent / "with_template"
    copy.mkdir(exist_ok=True)
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"eos_token": "<eos>", "chat_template": template}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return copy
