"""Every protocol with the real engine and the default model, by its own client package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import ollama
import pytest
from pydantic import BaseModel
from waiting import LIMIT

from appliance.engine.process.child import ENGINE_COMMAND
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

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


async def responses_with_a_tool(running: Running) -> None:
    create = running.openai.responses.create
    asked = await create(
        model="echo",
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
        model="echo",
        previous_response_id=asked.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}],
        temperature=0,
        max_output_tokens=30,
    )
    assert told.output_text
    parsed = await running.openai.responses.parse(
        model="echo", input="Oslo is rainy.", text_format=Place, temperature=0
    )
    assert isinstance(parsed.output_parsed, Place)


async def messages_with_a_tool(running: Running) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=running.url, api_key="unused", max_retries=0, timeout=LIMIT
    ) as client:
        asked: Any = {
            "model": "echo",
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
            model="echo",
            max_tokens=200,
            messages=[{"role": "user", "content": "Oslo is rainy."}],
            output_format=Place,
        )
        assert isinstance(parsed.parsed_output, Place)


async def chats_with_a_format(running: Running) -> None:
    client = ollama.AsyncClient(host=running.url, timeout=LIMIT)
    try:
        answer = await client.chat(
            model="echo",
            messages=[{"role": "user", "content": "Oslo is rainy."}],
            format=SCHEMA,  # closed: left open, so small a model adds properties without end
            options={"temperature": 0},
        )
        assert json.loads(answer.message.content or "").keys() == {"city"}
        text = ""
        async for part in await client.generate(
            model="echo", prompt="Name a city.", format=SCHEMA, stream=True
        ):
            text += part.response or ""
        assert json.loads(text).keys() == {"city"}
    finally:
        await client._client.aclose()


async def test_even_a_small_model_calls_and_obeys(serve: Serve, smollm2_gguf: Path) -> None:
    async with serve(
        str(smollm2_gguf),
        command=ENGINE_COMMAND,
        tokenizer=Tokenizer.from_path(smollm2_gguf),
        limits=SupervisionLimits(),
        device="cpu",
        threads=2,
        max_model_len=1024,
    ) as running:
        await responses_with_a_tool(running)
        await messages_with_a_tool(running)
        await chats_with_a_format(running)
