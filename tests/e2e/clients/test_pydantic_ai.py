"""pydantic-ai: an agent whose answer is a class, and one that uses a tool before it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from pydantic_ai import Agent, ModelSettings, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.model

SETTINGS: ModelSettings = {"max_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def _client_is_imported() -> None:
    """Import the client once: it takes a second, in the only process that runs this file."""
    global Agent, ToolOutput, OpenAIChatModel, OpenAIProvider
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    city: Annotated[str, Field(max_length=20)]
    inhabitants: Annotated[int, Field(ge=0, le=99_999_999)]


@pytest.fixture
async def model(base_url: str) -> AsyncIterator[OpenAIChatModel]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:
        yield OpenAIChatModel("small", provider=OpenAIProvider(openai_client=openai))


async def test_an_agent_answers_with_the_class_that_it_was_given(
    model: OpenAIChatModel,
) -> None:
    agent = Agent(model, output_type=ToolOutput(Place), model_settings=SETTINGS, retries=0)
    answer = await agent.run("Where is the Eiffel tower?")
    assert isinstance(answer.output, Place)
    assert answer.usage.output_tokens > 0


async def test_an_agent_streams_what_it_says(model: OpenAIChatModel) -> None:
    agent = Agent(model, model_settings=SETTINGS, retries=0)
    async with agent.run_stream("What is the capital of Japan?") as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "Tokyo" in "".join(pieces)
