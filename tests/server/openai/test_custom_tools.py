"""Less common forms of tools in chat completions: custom tools, and `functions`.

The `openai` package's types check the bodies, and its client reads the answers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)
from pydantic import TypeAdapter
from support.echo.echo_templates import TOOLS

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

CHAT = "/v1/chat/completions"
PATCH = '*** Begin Patch\n"x" \\ 🎈\n'
GRAMMAR = 'start: "*** Begin Patch" LF\nLF: /\\n/'


def custom(name: str, **fields: Any) -> Any:
    tool = {"type": "custom", "custom": {"name": name, **fields}}
    return TypeAdapter(ChatCompletionToolUnionParam).validate_python(tool)


def by_grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


PATCHER = custom("apply_patch", description="Edits files.", format=by_grammar("lark", GRAMMAR))
SAY = custom("say", format={"type": "text"})
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
OLD: Any = [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The turns and tools that reach the template."""
    found: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        found.append((messages, options["tools"]))
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    return found


async def whole_of(running: Running, body: Any) -> ChatCompletion:
    response = await running.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


async def streamed(running: Running, body: Any) -> list[Any]:
    """The deltas of the first choice, and its finish reason at the end.

    The package's type of a chunk has no custom calls; openai/openai-openapi#576 shows their form.
    """
    frames = [json.loads(one) for one in await running.frames(CHAT, **body) if one != "[DONE]"]
    for frame in copy.deepcopy(frames):
        for one in frame["choices"]:
            calls = one["delta"].get("tool_calls", [])
            calls[:] = (call for call in calls if "custom" not in call)
        ChatCompletionChunk.model_validate(frame)
    choices = [frame["choices"][0] for frame in frames if frame["choices"]]
    return [*(one["delta"] for one in choices), choices[-1]["finish_reason"]]


async def test_custom_calls_whole_and_streamed(serve: Serve, tokenizer: Tokenizer) -> None:
    """They come between calls of a function, whose pieces arrive as they are generated."""
    oslo, rome = call("weather", city="Oslo"), call("weather", city="Rome")
    text = "\n".join(["Hm.", oslo, call("apply_patch", input=PATCH), call("say", input="hi"), rome])
    counts = {"include_usage": True, "continuous_usage_stats": True}
    for fields in ({}, {"logprobs": True}, {"stream": True, "stream_options": counts}):
        body = {
            "messages": [{"role": "user", "content": text}],
            "tools": [PATCHER, SAY, WEATHER],
            **fields,
        }
        async with serve(tokenizer=tokenizer, max_model_len=4096) as running:
            whole = {name: body[name] for name in body if not name.startswith("stream")}
            (choice,) = (await whole_of(running, whole)).choices
            *deltas, reason = await streamed(running, body)
        assert choice.finish_reason == reason == "tool_calls"
        assert choice.message.content == "Hm."
        calls: list[Any] = choice.message.tool_calls or []
        assert len({one.id for one in calls}) == 4
        assert [one.model_dump(exclude={"id"}) for one in calls] == [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"type": "custom", "custom": {"name": "apply_patch", "input": PATCH}},
            {"type": "custom", "custom": {"name": "say", "input": "hi"}},
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        ]
        entries = [one for delta in deltas for one in delta.get("tool_calls", ())]
        begins = [one for one in entries if "id" in one]
        assert [(one["index"], one["type"]) for one in begins] == [
            (0, "function"), (1, "custom"), (2, "custom"), (3, "function"),
        ]  # fmt: skip
        assert begins[1]["custom"] == {"name": "apply_patch", "input": ""}
        for index, one in enumerate(calls):
            own = [entry.get(one.type, {}) for entry in entries if entry["index"] == index]
            field = "input" if one.type == "custom" else "arguments"
            joined = "".join(entry.get(field, "") for entry in own)
            assert joined == getattr(getattr(one, one.type), field)
        assert "".join(delta.get("content", "") for delta in deltas) == "Hm."


async def test_a_cut_input_ends_where_the_answer_did(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for text, end, expected in (
            (call("say", input="one two"), "two", "one "),
            (call("say", input="one two"), 'put"', ""),
            (call("say", input="one two"), '"one', ""),
            (call("say", input="a\u2028"), "2028", "a"),
        ):
            body = {
                "messages": [{"role": "user", "content": text}],
                "tools": [SAY],
                "max_tokens": text.index(end),
            }
            (choice,) = (await whole_of(running, body)).choices
            *deltas, reason = await streamed(running, body)
            assert choice.finish_reason == reason == "length"
            (found,) = choice.message.tool_calls or []
            assert found.type == "custom"
            entries = [one["custom"] for delta in deltas for one in delta.get("tool_calls", ())]
            assert found.custom.input == "".join(one["input"] for one in entries) == expected


async def test_the_client_s_own_reading_of_a_stream(serve: Serve, tokenizer: Tokenizer) -> None:
    text = call("say", input="hi")
    async with (
        serve(tokenizer=tokenizer, max_model_len=2048) as running,
        running.openai.chat.completions.stream(
            model="echo", messages=[{"role": "user", "content": text}], tools=[SAY]
        ) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
    entries = [one for c in chunks for d in c.choices for one in d.delta.tool_calls or ()]
    assert "".join((one.model_extra or {})["custom"]["input"] for one in entries) == "hi"


async def test_choices_among_custom_tools(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    named = {"type": "custom", "custom": {"name": "say"}}

    def allowed(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}

    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        grammars: list[Any] = []
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            grammars.append(request.sampling.grammar)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        for choice, offered, must in (
            (named, ["apply_patch", "say", "weather"], True),
            ("required", ["apply_patch", "say", "weather"], True),
            (allowed("auto"), ["say"], False),
            (allowed("required"), ["say"], True),
        ):
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [PATCHER, SAY, WEATHER],
                "tool_choice": choice,
                "max_tokens": 16,
            }
            await whole_of(running, body)
            assert [tool["function"]["name"] for tool in seen[-1][1]] == offered
            assert (grammars[-1] is not None) is must
        digits = custom("digits", format=by_grammar("regex", "[0-9]{3}"))
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [digits]}
        await whole_of(running, {**body, "max_tokens": 16})
        assert "[0-9]{3}" in grammars[-1].text
        await whole_of(running, {**body, "tools": [PATCHER], "max_tokens": 16})
        assert r"\\*\\*\\* Begin" in grammars[-1].text


async def test_wrong_formats_are_named(serve: Serve, tokenizer: Tokenizer) -> None:
    place = "tools[0].custom.format"
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for form, param, words in (
            ({"type": "xml"}, "tools", f"{place} is of type 'xml'"),
            ({"type": "grammar"}, "tools", f"{place}.grammar needs a definition"),
            (by_grammar("ebnf", "x"), "tools", f"{place}.grammar needs a definition"),
            (by_grammar("lark", 'start: "(" start ")" | "x"'), f"{place}.grammar.definition",
             "start nests in itself"),
            (by_grammar("regex", "(["), f"{place}.properties.input.pattern", "pattern"),
        ):  # fmt: skip
            tool = {"type": "custom", "custom": {"name": "f", "format": form}}
            body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            refused = await running.http.post(CHAT, json=body)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"] == param
            assert words in error["message"]


async def test_the_history_of_custom_calls(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    history: Any = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}},
            {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(history)
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        await whole_of(running, {"messages": history, "tools": [PATCHER], "max_tokens": 16})
    turns, listed = seen[-1]
    called = [one["function"] for one in turns[1]["tool_calls"]]
    assert called[0] == {"name": "apply_patch", "arguments": {"input": PATCH}}
    assert called[1] == {"name": "weather", "arguments": {}}
    assert [turn.get("name") for turn in turns[2:4]] == ["apply_patch", "weather"]
    assert GRAMMAR in listed[0]["function"]["description"]


async def test_functions_are_answered_as_they_were_asked_for(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """One `function_call`, whole and in pieces, with its own finish reason."""
    text = "Hm." + call("weather", city="Oslo") + call("weather", city="Rome")
    messages = [{"role": "user", "content": text}]
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for choice in (None, "auto", {"name": "weather"}):
            body = {"messages": messages, "functions": OLD, "function_call": choice}
            (found,) = (await whole_of(running, body)).choices
            *deltas, reason = await streamed(running, body)
            assert found.finish_reason == reason == "function_call"
            assert found.message.tool_calls is None
            assert found.message.function_call is not None
            assert found.message.function_call.model_dump() == {
                "name": "weather",
                "arguments": '{"city": "Oslo"}',
            }
            pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
            assert not any("tool_calls" in delta for delta in deltas)
            assert pieces[0] == {"arguments": "", "name": "weather"}
            assert all(piece.keys() == {"arguments"} for piece in pieces[1:])
            assert "".join(piece["arguments"] for piece in pieces) == '{"city": "Oslo"}'
        without = {"messages": messages, "functions": OLD, "function_call": "none"}
        (found,) = (await whole_of(running, without)).choices
        assert (found.finish_reason, found.message.content) == ("stop", text)
        cut = {"messages": messages, "functions": OLD, "max_tokens": text.index("slo")}
        (found,) = (await whole_of(running, cut)).choices
        *_, reason = await streamed(running, cut)
        assert found.finish_reason == reason == "length"
        assert found.message.function_call is not None
        assert found.message.function_call.arguments == '{"city": "O'
        both = await running.http.post(CHAT, json={**without, "tools": [SAY]})
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "functions"


async def test_the_history_of_functions(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    def called(arguments: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        return {"role": "assistant", "content": None, "function_call": function}

    history: Any = [
        {"role": "user", "content": "Do it."},
        called('{"city": "Oslo"}'),
        {"role": "function", "name": "weather", "content": "rain"},
        called('{"city": "Rome"}'),
        {"role": "function", "name": "weather", "content": "sun"},
        {"role": "function", "name": "other", "content": "of a call that was left out"},
    ]
    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(history)
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        await whole_of(running, {"messages": history, "functions": OLD, "max_tokens": 16})
    turns, _ = seen[-1]
    assert [turn["role"] for turn in turns] == [
        "user", *["assistant", "tool"] * 2, "tool",
    ]  # fmt: skip
    arguments = [turn["tool_calls"][0]["function"]["arguments"] for turn in turns[1:5:2]]
    assert arguments == [{"city": "Oslo"}, {"city": "Rome"}]
    ids = [turn["tool_calls"][0]["id"] for turn in turns[1:5:2]]
    assert len(set(ids)) == 2
    assert [turn["tool_call_id"] for turn in turns[2:5:2]] == ids
    assert turns[2]["name"] == "weather"
