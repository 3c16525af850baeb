"""Responses with the `openai` package, and an engine that repeats the first message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.responses import Response
from support.echo.echoed_responses import OSLO, ROME, THOUGHT, WEATHER, events_of
from support.runs.waiting import until

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Serve


def runs_of(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of events; consecutive events of a kind count once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]


async def test_a_whole_response(serve: Serve) -> None:
    async with serve() as running:
        response = await running.openai.responses.create(
            model="echo", input="hello", metadata={"a": "b"}, user="somebody"
        )
        assert response.output_text == "user\nhello"
        assert response.id.startswith("resp_")
        assert (response.status, response.object, response.model) == (
            "completed", "response", "echo",
        )  # fmt: skip
        (item,) = response.output
        assert item.type == "message"
        assert (item.role, item.status, item.id[:4]) == ("assistant", "completed", "msg_")
        assert response.metadata == {"a": "b"}
        assert response.usage is not None
        assert response.usage.input_tokens == len("?user\nhello?\n?assistant\n")
        assert response.usage.output_tokens == len("?user\nhello?")
        assert response.usage.total_tokens == 36
        again = await running.openai.responses.create(model="echo", input="hello")
        assert again.usage is not None
        assert again.usage.input_tokens_details.cached_tokens == 16
        Response.model_validate(response.model_dump())


async def test_the_order_of_events(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        events = await events_of(running, input=THOUGHT, tools=[WEATHER])
        said = ["output_text.delta", "output_text.done"]
        thought = ["reasoning_text.delta", "reasoning_text.done"]
        call = [
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done",
        ]  # fmt: skip
        assert runs_of(events) == [
            "created", "in_progress",
            "output_item.added", "content_part.added", *thought, "content_part.done",
            "output_item.done",
            "output_item.added", "content_part.added", *said, "content_part.done",
            "output_item.done",
            *call, *call, "completed",
        ]  # fmt: skip
        assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == []
        response = Response.model_validate(events[-1]["response"])
        assert response.status == "completed"
        reasoning, message, first, second = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Hm, 🎈."
        assert message.type == "message"
        assert response.output_text == "Let me see."
        assert first.type == second.type == "function_call"
        assert json.loads(first.arguments) == {"city": "Oslo 🎈"}
        assert json.loads(second.arguments) == {"city": "Rome"}
        assert first.call_id != second.call_id
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 5
        for kind, field in (
            ("output_text", "text"),
            ("reasoning_text", "text"),
            ("function_call_arguments", "arguments"),
        ):
            for index in range(4):
                own = [e for e in events if e.get("output_index") == index]
                deltas = [e["delta"] for e in own if e["type"] == f"response.{kind}.delta"]
                done = [e[field] for e in own if e["type"] == f"response.{kind}.done"]
                assert ["".join(deltas)] == done or not deltas
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]


async def test_tokens_of_messages_are_reported(serve: Serve, tokenizer: Tokenizer) -> None:
    """They come with each delta and with the whole text, and nowhere in thoughts and calls."""
    include: Any = ["message.output_text.logprobs"]
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        asked: dict[str, Any] = {"input": THOUGHT, "tools": [WEATHER], "include": include}
        events = await events_of(running, **asked, top_logprobs=2)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        reported = [token for e in deltas for token in e["logprobs"]]
        assert "".join(token["token"] for token in reported).strip() == "Let me see."
        assert {len(token["top_logprobs"]) for token in reported} == {2}
        (done,) = [e for e in events if e["type"] == "response.output_text.done"]
        assert done["logprobs"] == reported
        assert events[-1]["response"]["top_logprobs"] == 2
        whole = await running.openai.responses.create(model="echo", **asked)
        (message,) = [item for item in whole.output if item.type == "message"]
        (text,) = message.content
        assert text.type == "output_text"
        assert text.logprobs is not None
        assert [one.token for one in text.logprobs] == [one["token"] for one in reported]
        assert text.logprobs[-1].bytes == list(b".")
        assert not text.logprobs[0].top_logprobs
        plain = await running.http.post("/v1/responses", json={"input": "hi", "top_logprobs": 0})
        assert plain.json()["output"][0]["content"][0]["logprobs"] == []


async def test_the_streaming_helper(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        whole = await running.openai.responses.create(model="echo", input=THOUGHT, tools=[WEATHER])
        await until(running.idle)
        async with running.openai.responses.stream(
            model="echo", input=THOUGHT, tools=[WEATHER]
        ) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text == "Let me see."
        for one, other in zip(whole.output, final.output, strict=True):
            ids = {"id", "call_id", "parsed_arguments"}
            assert one.model_dump(exclude=ids).items() <= other.model_dump(exclude=ids).items() or (
                one.type == other.type == "message"
            )


async def test_a_cut_response_is_incomplete(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        asked: dict[str, Any] = {"input": OSLO, "tools": [WEATHER]}
        asked["max_output_tokens"] = len(OSLO) - 20
        events = await events_of(running, **asked)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
        whole = (await running.http.post("/v1/responses", json=asked)).json()
        assert whole["status"] == "incomplete"
        assert whole["output"][0]["arguments"] == response["output"][0]["arguments"]


async def test_what_the_template_gets(serve: Serve, tokenizer: Tokenizer, seen: list[Any]) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather",
         "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "call_2", "name": "search", "namespace": "web__",
         "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "No."},
        {"type": "function_call_output", "call_id": "call_2",
         "output": [{"type": "input_text", "text": "Nothing."}]},
    ]  # fmt: skip
    space: Any = {
        "type": "namespace",
        "name": "web__",
        "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}}],
    }
    skipped: Any = {"type": "web_search", "external_web_access": False}
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        response = await running.openai.responses.create(
            model="echo",
            instructions="Be brief.",
            input=items,
            tools=[WEATHER, space, skipped],
            reasoning={"effort": "high", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            max_output_tokens=1,
        )
        assert response.reasoning is not None
        assert response.reasoning.effort == "high"
    ((turns, tools, options),) = seen
    roles = [turn["role"] for turn in turns]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool"]
    assert turns[3]["content"] == "I look."
    assert turns[3]["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in turns[3]["tool_calls"]] == [
        "weather", "web__search",
    ]  # fmt: skip
    assert turns[4] == {
        "role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "No.",
    }  # fmt: skip
    assert turns[5]["content"] == "Nothing."
    assert [tool["function"]["name"] for tool in tools] == ["weather", "web__search"]
    assert options["reasoning_effort"] == "high"


async def test_a_tool_of_a_namespace_is_called_by_both_names(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    text = '<tool_call>\n{"name": "web__search", "arguments": {}}\n</tool_call>'
    space: Any = {
        "type": "namespace",
        "name": "web",
        "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}}],
    }
    async with serve(tokenizer=tokenizer) as running:
        response = await running.openai.responses.create(model="echo", input=text, tools=[space])
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.namespace, call.name) == ("web", "search")


async def test_choices_of_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        create = running.openai.responses.create
        asked: dict[str, Any] = {"model": "echo", "input": f"{OSLO}{ROME}", "tools": [WEATHER]}
        assert len((await create(**asked)).output) == 2
        assert len((await create(**asked, parallel_tool_calls=False)).output) == 1
        assert (await create(**asked, tool_choice="none")).output[0].type == "message"
        named = await create(**asked, tool_choice={"type": "function", "name": "weather"})
        assert named.output[0].type == "function_call"
        allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}
        assert len((await create(**asked, tool_choice=allowed)).output) == 2


async def test_what_does_not_run_here_is_refused_by_name(serve: Serve) -> None:
    def holding(**part: Any) -> Any:
        return [{"role": "user", "content": [{"type": "input_image", **part}]}]

    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
        ({"tools": [{"type": "code_interpreter", "container": "x"}]}, "code_interpreter"),
        ({"tools": [{"type": "computer_use_preview"}]}, "computer_use_preview"),
        ({"tool_choice": {"type": "web_search"}}, "web_search"),
        ({"input": holding(image_url="https://here/x.png")}, "reads texts only"),
        ({"input": holding(image_url="file:///x.png")}, "addresses are not fetched"),
        ({"input": holding(image_url="data:image/png;base64,AAAA")}, "texts only"),
        ({"input": holding(file_id="file-1")}, "files are not kept"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'x' is not kept"),
        ({"input": [{"type": "item_reference"}]}, "item_reference"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "encrypted_content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "appliance-1:?"}]}, "encrypted"),
        ({"input": []}, "no items"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, r"text\.format\.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "text"}}}},
            r"text\.format\.schema\.type",
        ),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"input": "x" * 600}, "context"),
    ]
    async with serve() as running:
        for fields, text in cases:
            body: Any = {"model": "echo", "input": "hi", **fields}
            with pytest.raises(openai.BadRequestError, match=text) as refused:
                await running.openai.responses.create(**body)
            assert refused.value.param, fields
        assert running.idle()


async def test_a_failure_in_mid_stream_is_an_event(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        stream = await running.openai.responses.create(
            model="echo", input="hello " * 40, stream=True
        )
        kinds = [(await anext(stream)).type]
        running.state.engine.fail_all(ValueError("not for strangers"))
        last: Any = None
        async for event in stream:
            kinds.append(event.type)
            last = event
        assert kinds[0] == "response.created"
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error.code == "server_error"
        assert "strangers" not in last.response.error.message
        with pytest.raises(openai.NotFoundError):
            await running.openai.responses.retrieve(last.response.id)
