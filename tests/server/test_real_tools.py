"""Tools with the real engine and the default model, which knows nothing of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from appliance.engine.process.child import ENGINE_COMMAND
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

    from tests.server.conftest import Running, Serve

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Current weather.", "parameters": SCHEMA},
}
CLOCK: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {"name": "clock", "description": "The time.", "strict": True},
}
QUESTION: ChatCompletionMessageParam = {"role": "user", "content": "What is the weather in Oslo?"}


class Place(BaseModel):
    city: str
    rainy: bool


async def a_tool_loop(running: Running) -> None:
    """A call, its result, and an answer to that."""
    messages: list[ChatCompletionMessageParam] = [QUESTION]
    create = running.openai.chat.completions.create
    asked = await create(
        model="echo",
        messages=messages,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=120,
    )
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in SCHEMA["properties"]["unit"]["enum"]
    messages.append(choice.message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 7}'})
    told = await create(
        model="echo",
        messages=messages,
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=30,
    )
    assert told.choices[0].message.content
    assert told.choices[0].message.tool_calls is None


async def required_calls(running: Running) -> None:
    """Whatever the seed, a call that can be read; streamed as whole."""
    for seed in range(3):
        async with running.openai.chat.completions.stream(
            model="echo",
            messages=[QUESTION],
            tools=[WEATHER, CLOCK],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            temperature=1.0,
            max_tokens=120,
        ) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert final.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert isinstance(json.loads(call.function.arguments), dict)
        assert call.function.name in {"get_weather", "clock"}


async def test_even_a_small_model_calls(serve: Serve, smollm2_gguf: Path) -> None:
    async with serve(
        str(smollm2_gguf),
        command=ENGINE_COMMAND,
        tokenizer=Tokenizer.from_path(smollm2_gguf),
        limits=SupervisionLimits(),
        device="cpu",
        threads=2,
        max_model_len=1024,
    ) as running:
        assert not running.state.tokenizer.dialect.writes_calls  # type: ignore[union-attr]
        await a_tool_loop(running)
        await required_calls(running)
        parsed = await running.openai.chat.completions.parse(
            model="echo", messages=[QUESTION], response_format=Place, max_tokens=60, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, Place)
        several = await running.openai.chat.completions.create(
            model="echo", messages=[QUESTION], tools=[CLOCK], tool_choice="required", max_tokens=200
        )
        assert several.choices[0].message.tool_calls
        assert len(several.choices[0].message.tool_calls) <= 8
