"""Tools with the default model, which was not trained on them, by the openai package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

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


async def test_a_tool_loop(openai: AsyncOpenAI) -> None:
    """The client sends a call's result and gets an answer to that."""
    messages: list[ChatCompletionMessageParam] = [QUESTION]
    create = openai.chat.completions.create
    asked = await create(
        model="small",
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
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 7}'})
    told = await create(
        model="small",
        messages=messages,
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=30,
    )
    assert told.choices[0].message.content
    assert told.choices[0].message.tool_calls is None


async def test_required_calls(openai: AsyncOpenAI) -> None:
    """Every seed gives a call that can be read, streamed or whole."""
    for seed in range(3):
        async with openai.chat.completions.stream(
            model="small",
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


async def test_a_class_is_parsed_and_calls_are_bounded(openai: AsyncOpenAI) -> None:
    parsed = await openai.chat.completions.parse(
        model="small", messages=[QUESTION], response_format=Place, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
    several = await openai.chat.completions.create(
        model="small", messages=[QUESTION], tools=[CLOCK], tool_choice="required", max_tokens=200
    )
    assert several.choices[0].message.tool_calls
    assert len(several.choices[0].message.tool_calls) <= 8
