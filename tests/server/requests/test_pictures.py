"""Pictures in requests to a model that reads texts alone, through every protocol."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.runs.waiting import LIMIT, until

from appliance.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.media.pictures import Pictures
    from appliance.media.spec import ImageDetail
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


class SlowReader:
    """Keeps one picture, and reads others only when it is told to."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.may_go = threading.Event()

    def kept(self, data: bytes, detail: ImageDetail) -> None:
        if data == KEPT:
            raise ImageError("it is kept")  # enough to see that nobody waited

    def read(self, data: bytes, detail: ImageDetail) -> None:
        self.reads.append(data)
        assert self.may_go.wait(LIMIT)
        raise ImageError("it was read")

    def rest(self) -> None:
        return

    def close(self) -> None:
        return


KEPT = b"kept"


async def test_pictures_are_read_one_by_one_until_their_client_leaves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(*pictures: bytes) -> list[dict[str, Any]]:
        urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures]
        return said(*({"type": "image_url", "image_url": {"url": url}} for url in urls))

    async with serve() as running:
        reader, run = SlowReader(), running.state.texts.run
        running.state.pictures = cast("Pictures", reader)
        waiting = 0

        async def counted(work: Callable[[], Any], **more: Any) -> Any:
            nonlocal waiting
            waiting += 1
            try:
                return await run(work, **more)
            finally:
                waiting -= 1

        monkeypatch.setattr(running.state.texts, "run", counted)
        path = "/v1/chat/completions"
        several = [bytes((1, number)) for number in range(20)]
        asking = [
            asyncio.create_task(running.http.post(path, json={"messages": parts(*several)}))
            for _ in range(4)
        ]
        await until(lambda: len(reader.reads) == 2, "all threads for long work read")
        answer = await running.http.post(path, json={"messages": parts(KEPT)})
        assert "it is kept" in answer.text, "it waited for none of them"
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: waiting == 0, "the server has noticed")
        reader.may_go.set()
        answer = await running.http.post(path, json={"messages": parts(b"other")})
        assert "it was read" in answer.text
        assert reader.reads[2:] == [b"other"], "nothing is read for nobody"
        running.state.pictures = None
