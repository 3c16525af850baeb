"""The `anthropic` package as the client, in front of an engine that repeats the first message."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS
from support.runs.waiting import LIMIT, until

from appliance.server.anthropic.turns import client_tool
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import anthropic
    from anthropic.types import MessageParam, ToolParam

    from tests.server.conftest import Running, Serve

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🎈"}}\n</tool_call>'
WEATHER: ToolParam = {
    "name": "weather",
    "description": "Now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = f"<think>\nHm, 🎈.\n</think>\n\nLet me see.\n{OSLO}"


@pytest.fixture(scope="module", autouse=True)
def _client_is_imported() -> None:
    """Import the client once: it takes a second, in the only process that runs this file."""
    global anthropic
    import anthropic


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


@asynccontextmanager
async def client_of(
    running: Running, key: str = "unused"
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=running.url, api_key=key, max_retries=0, timeout=LIMIT
    ) as client:
        yield client


def user(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


async def test_a_whole_message(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        message = await client.messages.create(
            model="echo",
            max_tokens=100,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        )
        assert message.id.startswith("msg_")
        assert (message.type, message.role, message.model) == ("message", "assistant", "echo")
        (block,) = message.content
        assert block.type == "text"
        assert block.text == "user\nhello"
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        prompt = "?user\nhello?\n?assistant\n"  # a question mark for each control token
        assert message.usage.input_tokens == len(prompt)
        assert message.usage.output_tokens == len("?user\nhello?")
        assert message.usage.cache_creation_input_tokens == 0
        assert message._request_id


async def test_cached_tokens_are_counted_apart(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        first = await client.messages.create(model="echo", max_tokens=4, messages=user("x" * 64))
        again = await client.messages.create(model="echo", max_tokens=4, messages=user("x" * 64))
        assert first.usage.cache_read_input_tokens == 0
        cached = again.usage.cache_read_input_tokens
        assert cached is not None
        assert cached >= 64
        assert again.usage.input_tokens + cached == first.usage.input_tokens


async def test_why_a_message_ends(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        create = client.messages.create
        cut = await create(model="echo", max_tokens=3, messages=user("hello"))
        assert cut.stop_reason == "max_tokens"
        stopped = await create(
            model="echo", max_tokens=99, messages=user("hello"), stop_sequences=["zz", "ll"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ll")
        full = await create(
            model="echo", max_tokens=10_000, messages=user("@" * 400), stop_sequences=["@@@\n"]
        )
        assert full.stop_reason in {"model_context_window_exceeded", "stop_sequence"}
        async with client.messages.stream(
            model="echo", max_tokens=99, messages=user("hello"), stop_sequences=["ll"]
        ) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "ll")


async def test_thoughts_and_calls_are_blocks_whole_and_streamed(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        asked: dict[str, Any] = {
            "model": "echo",
            "max_tokens": 300,
            "messages": user(THOUGHT),
            "tools": [WEATHER],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = await client.messages.create(**asked)
        thought, text, call = whole.content
        assert thought.type == "thinking"
        assert thought.thinking == "Hm, 🎈."
        assert thought.signature
        assert text.type == "text"
        assert text.text == "Let me see."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Oslo 🎈"})
        assert call.id.startswith("toolu_")
        assert whole.stop_reason == "tool_use"
        assert whole.usage.output_tokens_details is not None
        assert whole.usage.output_tokens_details.thinking_tokens > 5
        await until(running.idle)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens == whole.usage.output_tokens
        for one, other in zip(whole.content, final.content, strict=True):
            assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


async def test_the_order_of_events(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        body = {
            "model": "echo",
            "max_tokens": 300,
            "messages": user(THOUGHT),
            "tools": [WEATHER],
            "stream": True,
        }
        response = await running.http.post("/v1/messages", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = []
        for frame in response.text.strip().split("\n\n"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
        kinds = [event["type"] for event in events]
        runs = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert runs == ["message_start", *block * 3, "message_delta", "message_stop"]
        assert events[0]["message"]["content"] == []
        assert events[0]["message"]["stop_reason"] is None
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1, 2]
        assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        assert starts[1]["content_block"] == {"type": "text", "text": ""}
        assert starts[2]["content_block"]["input"] == {}
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert [delta["type"] for delta in deltas].count("signature_delta") == 1
        pieces = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"]
        assert len(pieces) > 5
        assert json.loads("".join(pieces)) == {"city": "Oslo 🎈"}


async def test_what_the_template_gets(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        seen.append((messages, options["tools"], options["options"]))
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    messages: list[Any] = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "No."},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no city"}],
                },
                {"type": "text", "text": "And then?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        await client.messages.create(
            model="echo",
            max_tokens=1,
            messages=messages,
            tools=[WEATHER],
            system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            metadata={"user_id": "somebody"},
            output_config={"effort": "high"},
            thinking={"type": "adaptive"},
        )
        await client.messages.create(model="echo", max_tokens=1, messages=user("hi"))
    (turns, tools, options), (_, _, plain) = seen
    assert [turn["role"] for turn in turns] == [
        "system", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip
    assert turns[0]["content"] == "Be brief.\nBe kind."
    assert turns[2]["reasoning_content"] == "Hm."
    assert turns[2]["content"] == "I look."
    assert turns[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert turns[3] == {
        "role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "No.",
    }  # fmt: skip
    assert turns[4]["content"] == "Error: no city"
    assert turns[5]["content"] == "And then?"
    assert tools[0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert options == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert plain == {"enable_thinking": False, "thinking": False}


async def test_blocks_of_every_kind_in_a_history(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own types check each block."""
    seen: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        seen.append(messages)
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    searched = {
        "type": "web_search_result", "url": "https://a.example", "title": "Rain",
        "encrypted_content": "opaque", "page_age": None,
    }  # fmt: skip
    ran = {
        "type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0,
        "content": [],
    }  # fmt: skip
    messages: Any = [
        {
            "role": "user",
            "content": [
                {
                    "type": "document", "title": "Weather", "context": "Of today.",
                    "source": {"type": "text", "media_type": "text/plain", "data": "It rains."},
                    "citations": {"enabled": False},
                },
                {
                    "type": "document",
                    "source": {"type": "content", "content": [{"type": "text", "text": "Wet."}]},
                },
                {
                    "type": "search_result", "source": "https://b.example", "title": "Found",
                    "content": [{"type": "text", "text": "A line."}],
                },
                {"type": "text", "text": "Rain?"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I search."},
                {
                    "type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search",
                    "input": {"query": "rain"},
                },
                {
                    "type": "web_search_tool_result", "tool_use_id": "srvtoolu_1",
                    "content": [searched],
                },
                {
                    "type": "server_tool_use", "id": "srvtoolu_2", "name": "code_execution",
                    "input": {"code": "6 * 7"},
                },
                {
                    "type": "code_execution_tool_result", "tool_use_id": "srvtoolu_2",
                    "content": ran,
                },
                {"type": "text", "text": "It rains.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result", "tool_use_id": "toolu_1",
                    "content": [
                        {
                            "type": "search_result", "source": "c", "title": "T",
                            "content": [{"type": "text", "text": "In a result."}],
                        }
                    ],
                }
            ],
        },
    ]  # fmt: skip
    import pydantic
    from anthropic.types import MessageParam

    pydantic.TypeAdapter(list[MessageParam]).validate_python(messages)
    async with (
        serve(tokenizer=tokenizer, max_model_len=4096) as running,
        client_of(running) as client,
    ):
        counted = await client.messages.count_tokens(model="echo", messages=messages)
        answer = await client.messages.create(model="echo", max_tokens=1, messages=messages)
        assert counted.input_tokens == answer.usage.input_tokens
        document = messages[0]["content"][0]
        for wrong, match in (
            ({**document, "citations": {"enabled": True}}, "citations"),
            ({**document, "source": {"type": "base64", "data": "AAAA"}}, "base64"),
            ({**document, "source": {"type": "url", "url": "x"}}, "url"),
            ({"type": "container_upload", "file_id": "x"}, "container_upload"),
        ):
            bad: Any = [{"role": "user", "content": [wrong]}]
            with pytest.raises(anthropic.BadRequestError, match=match):
                await client.messages.create(model="echo", max_tokens=1, messages=bad)
    turns = seen[0]
    assert [turn["role"] for turn in turns] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    for text in ("Weather", "Of today.", "It rains.", "Wet.", "https://b.example", "A line."):
        assert text in turns[0]["content"]
    assert turns[1]["tool_calls"][0]["function"]["name"] == "web_search"
    assert (turns[2]["tool_call_id"], turns[2]["name"]) == ("srvtoolu_1", "web_search")
    assert "https://a.example" in turns[2]["content"]
    assert "opaque" not in turns[2]["content"]
    assert json.loads(turns[4]["content"])["stdout"] == "42"
    assert turns[5]["content"] == "It rains."
    assert "In a result." in turns[6]["content"]


async def test_choices_of_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        asked: dict[str, Any] = {"model": "echo", "max_tokens": 300, "tools": [WEATHER]}
        both = user(f"{OSLO}{OSLO}")
        free = await client.messages.create(**asked, messages=both)
        assert len(free.content) == 2
        one = await client.messages.create(
            **asked,
            messages=both,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        assert len(one.content) == 1
        none = await client.messages.create(**asked, messages=both, tool_choice={"type": "none"})
        assert [block.type for block in none.content] == ["text"]
        named = await client.messages.create(
            **asked, messages=both, tool_choice={"type": "tool", "name": "weather"}
        )
        assert named.stop_reason == "tool_use"
        cut = await client.messages.create(**{**asked, "max_tokens": len(OSLO) - 20}, messages=both)
        assert cut.stop_reason == "max_tokens"
        assert cut.content[0].type == "tool_use"
        assert cut.content[0].input == {}, "what was cut is no object"


async def test_the_place_of_a_wrong_schema_is_named(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema\.type"):
            await client.messages.create(
                model="echo",
                max_tokens=9,
                messages=user("hi"),
                output_config={"format": {"type": "json_schema", "schema": {"type": "text"}}},
            )


async def test_tokens_are_counted_as_a_message_has_them(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        asked: dict[str, Any] = {
            "model": "echo", "messages": user("hello"), "system": "Be brief.", "tools": [WEATHER],
        }  # fmt: skip
        counted = await client.messages.count_tokens(**asked)
        message = await client.messages.create(**asked, max_tokens=1)
        assert counted.input_tokens == message.usage.input_tokens
        await until(running.idle)


async def test_errors_have_the_shape_of_the_protocol(serve: Serve) -> None:
    async with serve(server={"api_key": "secret-key"}) as running:
        async with client_of(running, "secret-key") as client:
            create = client.messages.create
            with pytest.raises(anthropic.NotFoundError, match="'echo'") as missing:
                await create(model="claude-x", max_tokens=9, messages=user("hi"))
            body: Any = missing.value.body
            assert body["type"] == "error"
            assert body["error"]["type"] == "not_found_error"
            assert body["request_id"] == missing.value.request_id
            with pytest.raises(anthropic.BadRequestError, match="context"):
                await create(model="echo", max_tokens=9, messages=user("x" * 600))
            image: Any = {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
            }
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.* texts"):
                await create(
                    model="echo", max_tokens=9, messages=[{"role": "user", "content": [image]}]
                )
            search: Any = {"type": "web_search_20250305", "name": "web_search"}
            with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
                await create(model="echo", max_tokens=9, messages=user("hi"), tools=[search])
            with pytest.raises(anthropic.BadRequestError, match="white space"):
                await create(
                    model="echo",
                    max_tokens=9,
                    messages=[*user("hi"), {"role": "assistant", "content": "Once "}],
                )
            lacking = await running.http.post(
                "/v1/messages",
                json={"messages": user("hi")},
                headers={"x-api-key": "secret-key", "anthropic-version": "2023-06-01"},
            )
            assert lacking.status_code == 400
            assert "max_tokens" in lacking.json()["error"]["message"]
        async with client_of(running, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="wrong") as denied:
                await client.messages.create(model="echo", max_tokens=9, messages=user("hi"))
            body = denied.value.body
            assert body["error"]["type"] == "authentication_error"


async def test_an_error_in_mid_stream_is_an_event(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running, client_of(running) as client:
        async with client.messages.stream(
            model="echo", max_tokens=300, messages=user("hello " * 40)
        ) as stream:
            await anext(aiter(stream.text_stream))
            running.state.engine.fail_all(ValueError("not for strangers"))
            with pytest.raises(anthropic.APIStatusError, match="internal error"):
                await stream.get_final_message()
        assert running.state.engine.num_running == 0


async def test_a_client_of_threads_goes_on_without(serve: Serve, tokenizer: Tokenizer) -> None:
    """The package's tool runner asks for a thread, and continues without only after this error."""
    asked: list[str] = []

    @anthropic.beta_async_tool  # type: ignore[untyped-decorator]
    async def weather(city: str) -> str:
        """The weather now."""
        asked.append(city)
        return "sunny"

    async with (
        serve(tokenizer=tokenizer, max_model_len=4096) as running,
        client_of(running) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model="echo",
            max_tokens=500,
            max_iterations=2,  # the engine would repeat the call
            messages=[{"role": "user", "content": OSLO}],
            tools=[weather],
        )
        await runner.until_done()
    assert asked == ["Oslo 🎈"] * 2


async def test_tools_that_anthropic_defines_and_the_client_runs(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """The inputs are those of Anthropic's documents; memory's are those of the package's types."""
    from anthropic.types.beta import BetaMemoryTool20250818Command
    from jsonschema import Draft202012Validator
    from pydantic import TypeAdapter

    memory: list[dict[str, Any]] = [
        {"command": "view", "path": "/memories", "view_range": [1, 9]},
        {"command": "create", "path": "/memories/a", "file_text": "x"},
        {"command": "str_replace", "path": "/memories/a", "old_str": "x", "new_str": "y"},
        {"command": "insert", "path": "/memories/a", "insert_line": 0, "insert_text": "z"},
        {"command": "delete", "path": "/memories/a"},
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    ]
    right: dict[str, list[dict[str, Any]]] = {
        "bash_20250124": [{"command": "ls"}, {"restart": True}],
        "text_editor_20250728": memory[:4],
        "text_editor_20250124": [
            {"command": "undo_edit", "path": "a"},
            {"command": "insert", "path": "a", "insert_line": 1, "new_str": "z"},
        ],
        "memory_20250818": memory,
    }
    TypeAdapter(list[BetaMemoryTool20250818Command]).validate_python(memory)
    async with (
        serve(tokenizer=tokenizer, max_model_len=8192) as running,
        client_of(running) as client,
    ):
        for kind, inputs in right.items():
            offered: Any = {"type": kind, "name": "tool"}
            found = client_tool(kind)
            assert found is not None
            _, schema = found
            for given in inputs:
                Draft202012Validator({**schema, "additionalProperties": False}).validate(given)
            assert not Draft202012Validator(schema).is_valid({"command": 5})
            called = json.dumps({"name": "tool", "arguments": inputs[-1]})
            text = f"<tool_call>\n{called}\n</tool_call>"
            message = await client.messages.create(
                model="echo", max_tokens=999, messages=user(text), tools=[offered]
            )
            (block,) = message.content
            assert block.type == "tool_use"
            assert block.input == inputs[-1]
        for kind in ("computer_20250124", "web_search_20250305", "code_execution_20250825"):
            refused: Any = {"type": kind, "name": "tool"}
            with pytest.raises(anthropic.BadRequestError, match=kind):
                await client.messages.create(
                    model="echo", max_tokens=9, messages=user("x"), tools=[refused]
                )


async def test_models_have_the_fields_of_the_protocol(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        page = await client.models.list()
        (model,) = page.data
        found = [model, await client.models.retrieve("echo")]
        assert (page.has_more, page.first_id, page.last_id) == (False, "echo", "echo")
    for one in found:
        strict = type(one).model_validate(one.model_dump())  # the package does not check answers
        assert (strict.id, strict.type, strict.display_name) == ("echo", "model", "echo")
        assert strict.max_input_tokens == 512
        assert strict.created_at.tzinfo is not None
