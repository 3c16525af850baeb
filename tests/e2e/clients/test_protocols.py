"""Every protocol with its own client package: a tool that must be called, a format to obey."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from pydantic import BaseModel
from support.runs.waiting import LIMIT

if TYPE_CHECKING:
    from openai import AsyncOpenAI

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Oslo?"


class Place(BaseModel):
    city: str
    rainy: bool


async def test_responses_with_a_tool(openai: AsyncOpenAI) -> None:
    create = openai.responses.create
    asked = await create(
        model="small",
        input=QUESTION,
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
        temperature=0,
        max_output_tokens=120,
    )
    (call,) = asked.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"city"}
    told = await create(
        model="small",
        previous_response_id=asked.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}],
        temperature=0,
        max_output_tokens=30,
    )
    assert told.output_text
    parsed = await openai.responses.parse(
        model="small", input="Oslo is rainy.", text_format=Place, temperature=0
    )
    assert isinstance(parsed.output_parsed, Place)


async def test_messages_with_a_tool(url: str) -> None:
    import anthropic  # takes a second, in the only process that runs this test

    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="unused", max_retries=0, timeout=LIMIT
    ) as client:
        asked: Any = {
            "model": "small",
            "max_tokens": 120,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        }
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        async with client.messages.stream(
            **asked,
            messages=messages,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as stream:
            called = await stream.get_final_message()
        assert called.stop_reason == "tool_use"
        (call,) = called.content
        assert call.type == "tool_use"
        assert call.input.keys() == {"city"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"}
        messages += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        told = await client.messages.create(
            **asked, messages=messages, tool_choice={"type": "none"}
        )
        assert told.content[0].type == "text"
        parsed = await client.messages.parse(
            model="small",
            max_tokens=200,
            messages=[{"role": "user", "content": "Oslo is rainy."}],
            output_format=Place,
        )
        assert isinstance(parsed.parsed_output, Place)


async def test_chats_with_a_format(url: str) -> None:
    client = ollama.AsyncClient(host=url, timeout=LIMIT)
    try:
        answer = await client.chat(
            model="small",
            messages=[{"role": "user", "content": "Oslo is rainy."}],
            format=SCHEMA,  # closed: otherwise so small a model adds properties without end
            options={"temperature": 0},
        )
        assert json.loads(answer.message.content or "").keys() == {"city"}
        text = ""
        async for part in await client.generate(
            model="small", prompt="Name a city.", format=SCHEMA, stream=True
        ):
            text += part.response or ""
        assert json.loads(text).keys() == {"city"}
    finally:
        await client._client.aclose()
