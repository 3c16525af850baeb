"""Tools over HTTP, with an engine that repeats the first message."""

# ruff: noqa: E501 - texts as models and templates have them

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

    from tests.server.conftest import Serve

CHAT = "/v1/chat/completions"
# The text to repeat comes first, up to a token that ends an answer; "@" becomes a control token.
TEMPLATE = (
    "{% for m in messages %}{{ m.content | replace('@', '<spare259>') }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}"
    "{% endfor %}<|im_start|>"
)
TOOL: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🎈"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TEMPLATE)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": [TOOL], **fields}


def deltas(frames: list[str], choice: int = 0) -> list[dict[str, Any]]:
    chunks = [json.loads(frame) for frame in frames if frame != "[DONE]"]
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]


async def test_calls_of_a_whole_answer(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        answer = (await running.http.post(CHAT, json=ask(f"Let me see.\n{OSLO}\n{ROME}"))).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Oslo 🎈"}'},
            {"name": "weather", "arguments": '{"city": "Rome"}'},
        ]
        alone = (await running.http.post(CHAT, json=ask(OSLO))).json()["choices"][0]["message"]
        assert alone["content"] is None


async def test_calls_of_a_stream(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        parts = deltas(await running.frames(CHAT, **ask(f"Hm.\n{OSLO}{ROME} ")))
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert parts[-1]["delta"] == {}
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [
            "tool_calls"
        ]
        assert "".join(part["delta"].get("content", "") for part in parts) == "Hm."
        calls = [part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"]]
        assert {len(entries) for entries in calls} == {1}
        entries = [entry for (entry,) in calls]
        begins = [entry for entry in entries if "id" in entry]
        assert [entry["index"] for entry in begins] == [0, 1]
        assert all(
            entry["type"] == "function"
            and entry["function"] == {"name": "weather", "arguments": ""}
            for entry in begins
        )
        pieces = [entry for entry in entries if "id" not in entry]
        assert all(entry.keys() == {"index", "function"} for entry in pieces)
        assert all(entry["function"].keys() == {"arguments"} for entry in pieces)
        assert len(pieces) > 20
        for index, expected in enumerate(['{"city": "Oslo 🎈"}', '{"city": "Rome"}']):
            own = [e["function"]["arguments"] for e in pieces if e["index"] == index]
            assert "".join(own) == expected


async def test_a_call_ends_alike_whoever_chose_it(serve: Serve, tokenizer: Tokenizer) -> None:
    """OpenAI says `stop` after a call of a named tool; clients look for calls by the reason."""
    named = {"type": "function", "function": {"name": "weather"}}
    async with serve(tokenizer=tokenizer) as running:
        for choice in ("auto", "required", named):
            body = ask(OSLO, tool_choice=choice)
            (whole,) = (await running.http.post(CHAT, json=body)).json()["choices"]
            parts = deltas(await running.frames(CHAT, **body))
            assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"


async def test_one_call_only_if_the_client_says_so(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        body = ask(f"{OSLO}{ROME} and more", parallel_tool_calls=False, ignore_eos=True)
        (choice,) = (await running.http.post(CHAT, json=body)).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        await until(running.idle)
        parts = deltas(await running.frames(CHAT, **body))
        assert parts[-1]["finish_reason"] == "tool_calls"
        entries = [part["delta"].get("tool_calls", [{}])[0] for part in parts]
        assert len([entry for entry in entries if "id" in entry]) == 1


async def test_a_cut_stays_a_cut(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        for tokens, arguments in ((len(OSLO) - 20, '{"city": "Os'), (20, None)):
            body = ask(OSLO, max_tokens=tokens)
            (choice,) = (await running.http.post(CHAT, json=body)).json()["choices"]
            assert choice["finish_reason"] == "length"
            if arguments is None:
                assert not choice["message"]["content"], "half a call is no content"
                assert "tool_calls" not in choice["message"]
            else:
                (call,) = choice["message"]["tool_calls"]
                assert call["function"]["arguments"].startswith(arguments)
            parts = deltas(await running.frames(CHAT, **body))
            assert parts[-1]["finish_reason"] == "length"


async def test_a_required_call_that_comes_again_ends_the_answer(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    text = "\n".join([OSLO, ROME, OSLO, ROME])
    async with serve(tokenizer=tokenizer, max_model_len=4096) as running:
        for choice, count in (("required", 2), ("auto", 4)):
            body = ask(text, tool_choice=choice)
            (whole,) = (await running.http.post(CHAT, json=body)).json()["choices"]
            assert len(whole["message"]["tool_calls"]) == count
            assert whole["finish_reason"] == "tool_calls"
            await until(running.idle)
            parts = deltas(await running.frames(CHAT, **body))
            entries = [part["delta"].get("tool_calls", [{}])[0] for part in parts]
            assert len([entry for entry in entries if "id" in entry]) == count
            assert parts[-1]["finish_reason"] == "tool_calls"


async def test_a_choice_allows_some_of_the_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        sizes = []
        for names in (["weather"], ["weather", "clock"]):
            choice = allowed("auto", *names)
            body = ask(OSLO, tools=[TOOL, CLOCK], tool_choice=choice)
            answer = (await running.http.post(CHAT, json=body)).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            sizes.append(answer["usage"]["prompt_tokens"])
        assert sizes[0] < sizes[1], "the model sees those that it may call"
        for choice, words in (
            (allowed("auto", "weather", "nope"), "allows 'nope', which is not among the tools"),
            (allowed("required"), "required, but there are no tools"),
            ({"type": "allowed_tools"}, "needs the field allowed_tools"),
            ({"type": "function"}, "needs the field function"),
            ({"type": "custom"}, "needs the field custom"),
            ({"type": "mcp"}, "supported are function, custom and allowed_tools"),
            (
                allowed("auto")
                | {"allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
                "needs the field function",
            ),
        ):
            body = ask(OSLO, tool_choice=choice)
            refused = await running.http.post(CHAT, json=body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "tool_choice"
            assert words in error["message"]


async def test_without_tools_calls_are_text(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        several: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
        for fields in several:
            answer = (await running.http.post(CHAT, json=ask(OSLO, **fields))).json()
            assert answer["choices"][0]["message"]["content"] == OSLO
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert "completion_tokens_details" not in answer["usage"]
            prompt = len(f"{OSLO}\n".encode()) + 2
            assert answer["usage"]["prompt_tokens"] == prompt, "tools are left out of the prompt"


def with_schema(parameters: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "weather", "parameters": parameters, **fields}
    return {"type": "function", "function": function}


async def test_what_cannot_be_obeyed_is_refused(serve: Serve, tokenizer: Tokenizer) -> None:
    wrong = {"type": "object", "properties": {"city": {"type": "text"}}}
    place = "tools[1].function.parameters.properties.city.type"
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [CLOCK, with_schema(wrong)], "tool_choice": "required"}, place),
        ({"tools": [CLOCK, with_schema(wrong, strict=True)]}, place),
        ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ]
    async with serve(tokenizer=tokenizer) as running:
        for fields, param in cases:
            answer = await running.http.post(CHAT, json=ask("hi", **fields))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
        loose = ask("hi", tools=[CLOCK, with_schema(wrong)])
        assert (await running.http.post(CHAT, json=loose)).status_code == 200, "nothing is obeyed"
        fine = ask("hi", tool_choice="required", stop_token_ids=[0])
        assert (await running.http.post(CHAT, json=fine)).status_code == 200
        both = ask("hi", response_format=schema)
        assert (await running.http.post(CHAT, json=both)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
)
async def test_a_format_does_not_concern_an_answer_that_must_call(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """OpenAI's agents and instructor send both: a format for the final answer, and now a call."""
    seen: list[Any] = []
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    async with serve(tokenizer=tokenizer) as running:
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            seen.append(request.sampling.grammar)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        for body in (ask("hi", **fields), ask("hi", **fields, response_format=form)):
            assert (await running.http.post(CHAT, json=body)).status_code == 200
    assert seen[0] is not None
    assert seen[0] == seen[1], "the call's grammar, with a format or without"


async def test_malformed_calls_are_content(serve: Serve, tokenizer: Tokenizer) -> None:
    text = "<tool_call>weather(Oslo)</tool_call>"
    async with serve(tokenizer=tokenizer) as running:
        (choice,) = (await running.http.post(CHAT, json=ask(text))).json()["choices"]
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"
        stopped = (await running.http.post(CHAT, json=ask(text, stop="Oslo"))).json()
        assert stopped["choices"][0]["message"]["content"] == "<tool_call>weather("


async def test_several_choices_have_calls_of_their_own(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        text = f"    {OSLO}"  # the second choice begins one token later
        answer = (await running.http.post(CHAT, json=ask(text, n=2))).json()
        calls = [choice["message"]["tool_calls"] for choice in answer["choices"]]
        assert len({call["id"] for (call,) in calls}) == 2
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}
        frames = await running.frames(CHAT, **ask(text, n=2))
        for number in range(2):
            entries = [d["delta"].get("tool_calls", [{}])[0] for d in deltas(frames, number)]
            assert {entry["index"] for entry in entries if entry} == {0}


async def test_logprobs_are_of_every_token(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        body = ask(f"Hm. {OSLO}", logprobs=True)
        whole = (await running.http.post(CHAT, json=body)).json()["choices"][0]["logprobs"]
        data = b"".join(bytes(entry["bytes"]) for entry in whole["content"])
        assert data.decode() == f"Hm. {OSLO}"
        parts = deltas(await running.frames(CHAT, **body))
        streamed = [entry for p in parts for entry in (p["logprobs"] or {"content": []})["content"]]
        assert streamed == whole["content"]


async def test_a_control_token_can_begin_a_call(
    serve: Serve, tokenizer_with: Callable[..., Tokenizer]
) -> None:
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    template = template.replace(
        '{"name": "{{ c.function.name }}", "arguments": ', "{{ c.function.name }}[ARGS]"
    )
    template = template.replace("tojson }}}", "tojson }}").replace("<spare259>", "[TOOL_CALLS]")
    tokenizer = tokenizer_with(template, "[TOOL_CALLS]")
    assert tokenizer.dialect.form.name == "mistral"
    async with serve(tokenizer=tokenizer) as running:
        body = ask('@weather[ARGS]{"city": "Oslo"}')
        (choice,) = (await running.http.post(CHAT, json=body)).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert re.fullmatch("[0-9a-zA-Z]{9}", call["id"])
        plain = (await running.http.post(CHAT, json=body | {"tools": None})).json()
        assert plain["choices"][0]["message"]["content"] == 'weather[ARGS]{"city": "Oslo"}'


async def test_earlier_calls_and_results_reach_the_template(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        seen.append((messages, options["tools"]))
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    call = {
        "id": "call_1",
        "type": "function",
        "index": 0,
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    async with serve(tokenizer=tokenizer) as running:
        messages = [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "No."}],
            },
            {"role": "tool", "tool_call_id": "of a call that is gone", "content": "?"},
        ]
        response = await running.http.post(CHAT, json=ask("", messages=messages, max_tokens=1))
        assert response.status_code == 200, response.text
    ((turns, tools),) = seen
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert turns[1]["content"] == ""
    assert turns[1]["reasoning_content"] == "Hm."
    assert turns[2] == {
        "role": "tool",
        "tool_call_id": "call_1",
        "name": "weather",
        "content": "No.",
    }
    assert tools[0]["function"]["description"] == "Now."


async def test_the_openai_client(serve: Serve, tokenizer: Tokenizer) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Hm. {OSLO}{ROME}"}]
    async with serve(tokenizer=tokenizer) as running:
        answer = await running.openai.chat.completions.create(
            model="echo", messages=messages, tools=[TOOL]
        )
        assert answer.choices[0].message.tool_calls is not None
        async with running.openai.chat.completions.stream(
            model="echo", messages=messages, tools=[TOOL]
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert final.choices[0].message.content == "Hm."
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls is not None
        for one, other in zip(
            answer.choices[0].message.tool_calls, final.choices[0].message.tool_calls, strict=True
        ):
            assert one.type == other.type == "function"
            assert one.function.arguments == other.function.arguments
