"""Pictures in requests to a model that reads texts alone, through every protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.conftest import Serve

URL = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CHAT = {"type": "image_url", "image_url": {"url": URL}}
ITEM = {"type": "input_image", "image_url": URL}
BLOCK = {"type": "image", "source": SOURCE}


def said(*parts: dict[str, Any], role: str = "user", **fields: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": [*parts], **fields}]


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [BLOCK], "is_error": True}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [ITEM]}
ATTACHED = {"role": "user", "content": "?", "images": ["AAAA"]}
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": said(CHAT)}, "messages[0].content[0]"),
    (
        "/v1/chat/completions",
        {"messages": said(CHAT, role="tool", tool_call_id="1")},
        "messages[0].content[0]",
    ),
    ("/v1/responses", {"input": said(ITEM)}, "input[0].content[0]"),
    ("/v1/responses", {"input": [OUTPUT]}, "input[0].output[0]"),
    ("/v1/messages", {"messages": said(BLOCK), "max_tokens": 9}, "messages.0.content.0"),
    ("/v1/messages", {"messages": said(RESULT), "max_tokens": 9}, "messages.0.content.0.content.0"),
    ("/v1/messages/count_tokens", {"messages": said(BLOCK)}, "messages.0.content.0"),
    ("/api/chat", {"messages": [ATTACHED]}, "messages[0].images[0]"),
    ("/api/generate", {"prompt": "?", "images": ["AAAA"]}, "images[0]"),
    ("/api/generate", {"images": ["AAAA"]}, "images[0]"),
    ("/tokenize", {"messages": said(CHAT)}, "messages[0].content[0]"),
]


@pytest.mark.parametrize(("path", "fields", "where"), REQUESTS)
async def test_a_model_of_texts_says_so(
    serve: Serve, path: str, fields: dict[str, Any], where: str
) -> None:
    async with serve() as running:
        answer = await running.http.post(path, json={"model": "echo", **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(where)
        assert "this model reads texts only" in message
        if path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
            assert error["code"] == "unsupported_content"
            assert error["param"] == where.split("[")[0]
        assert running.idle()


async def test_a_raw_prompt_and_an_address_take_no_pictures(serve: Serve) -> None:
    async with serve() as running:
        for fields, message in (
            ({"raw": True, "images": ["AAAA"]}, "images needs a chat template, which raw"),
            ({"suffix": "x", "images": ["AAAA"]}, "images needs a chat template, which suffix"),
            ({"images": ["https://example.com/x.png"]}, "images[0] is no base64"),
        ):
            body = {"model": "echo", "prompt": "?", **fields}
            answer = await running.http.post("/api/generate", json=body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]


async def test_lists_of_texts_are_texts(serve: Serve) -> None:
    async with serve() as running:
        text = {"type": "text", "text": "one"}
        chat = await running.http.post(
            "/tokenize", json={"model": "echo", "messages": said(text, text)}
        )
        plain = [{"role": "user", "content": "one\none"}]
        same = await running.http.post("/tokenize", json={"model": "echo", "messages": plain})
        assert chat.json()["tokens"] == same.json()["tokens"]
