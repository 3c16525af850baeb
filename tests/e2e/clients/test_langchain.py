"""langchain-openai: a chat, a stream with usage, bound tools, a structured answer, vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import httpx
import pytest
from pydantic import BaseModel, Field, SecretStr

if TYPE_CHECKING:
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

pytestmark = pytest.mark.model

QUESTION = "What is the capital of Japan?"


class Place(BaseModel):
    """A town."""

    city: Annotated[str, Field(max_length=20)]
    country: Annotated[str, Field(max_length=20)]


@pytest.fixture(scope="module", autouse=True)
def _client_is_imported() -> None:
    """Import the client once: it takes seconds, in the only process that runs this file."""
    global AIMessage, HumanMessage, ToolMessage, tool, ChatOpenAI, OpenAIEmbeddings
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def rain(city: Annotated[str, Field(max_length=20)]) -> str:
    """Say how much it rains in a town."""
    return f"12 mm in {city}"


@pytest.fixture
def chat(base_url: str) -> Iterator[ChatOpenAI]:
    with httpx.Client() as client:
        yield ChatOpenAI(
            base_url=base_url,
            api_key=SecretStr("none"),
            model="small",
            temperature=0,
            max_completion_tokens=120,
            max_retries=0,
            stream_usage=True,
            http_client=client,
        )


def test_a_chat_is_answered_and_streamed_alike(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert "Tokyo" in str(whole.content)
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert isinstance(whole, AIMessage)
    assert whole.usage_metadata is not None
    assert sum(part["output_tokens"] for part in usage) == whole.usage_metadata["output_tokens"]


def test_a_bound_tool_is_called_and_its_result_taken_back(chat: ChatOpenAI) -> None:
    history: list[BaseMessage] = [HumanMessage("Does it rain in Oslo?")]
    bound = tool(rain)
    asked = chat.bind_tools([bound], tool_choice="rain").invoke(history)
    (call,) = asked.tool_calls
    assert call["name"] == "rain"
    result = bound.invoke(call)
    assert isinstance(result, ToolMessage)
    told = chat.invoke([*history, asked, result])
    assert told.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer_is_of_the_class_asked_for(chat: ChatOpenAI, method: str) -> None:
    answer = chat.with_structured_output(Place, method=method).invoke(QUESTION)
    assert isinstance(answer, Place)


def test_texts_become_vectors_that_tell_them_apart(base_url: str) -> None:
    with httpx.Client() as client:
        embeddings = OpenAIEmbeddings(
            base_url=base_url,
            api_key=SecretStr("none"),
            model="small",
            max_retries=0,
            check_embedding_ctx_length=False,  # it would fetch another model's tokenizer
            http_client=client,
        )
        texts = ["The cat sleeps on the mat.", "A cat is asleep on a mat.", "Stock markets fell."]
        first, second, third = embeddings.embed_documents(texts)
        assert embeddings.embed_query(texts[0]) == pytest.approx(first, abs=1e-6)
    assert sum(value * value for value in first) == pytest.approx(1.0, abs=1e-5)
    near = sum(a * b for a, b in zip(first, second, strict=True))
    far = sum(a * b for a, b in zip(first, third, strict=True))
    assert near > far
