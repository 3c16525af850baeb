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


def chat(part: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": said(part, role=role)}


def image_url(given: Any) -> tuple[str, dict[str, Any]]:
    return chat({"type": "image_url", "image_url": given})


def responses(role: str = "user", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": said({"type": "input_image", **fields}, role=role)}


def messages(source: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    part = {"type": "image", "source": source}
    return "/v1/messages", {"max_tokens": 9, "messages": said(part, role=role)}


def base64_source(data: Any, media_type: Any = "image/png") -> tuple[str, dict[str, Any]]:
    return messages({"type": "base64", "media_type": media_type, "data": data})


def ollama(images: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"messages": [{"role": "user", "content": "?", "images": images}]}


def generate(images: Any) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": "?", "images": images}


SEND_DATA = "is empty; send the picture itself as a data: URL with base64"
NO_BASE64 = "a data: URL without base64; write data:image/png;base64,"
NO_IMAGE = "has the media type 'text/plain'; send an image"
TEXT_URL = "data:text/plain;base64,AAAA"
SOURCES = "send an object with the type, such as base64"
IN_USER = "is an image; put it into a message of the user"
ODD: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (image_url(None), f"messages[0].content[0].image_url {SEND_DATA}"),
    (chat({"type": "image_url"}), f"messages[0].content[0].image_url {SEND_DATA}"),
    (image_url({}), SEND_DATA),
    (image_url(""), SEND_DATA),
    (image_url({"url": ""}), SEND_DATA),
    (image_url({"url": None}), SEND_DATA),
    (image_url({"url": 5}), "image_url.url: Expected `str | null`, got `int`"),
    (image_url([]), "image_url: Expected `str | object | null`, got `array`"),
    (image_url("data:image/png;base64"), NO_BASE64),
    (image_url("data:image/png,AAAA"), NO_BASE64),
    (image_url({"url": TEXT_URL}), NO_IMAGE),
    (image_url("data:image/png;base64,"), "is empty; send a picture's bytes in base64"),
    (image_url("data:image/png;base64,A"), "is no base64"),
    (image_url({"url": URL, "detail": "most"}), "known are auto, low, high, original"),
    (image_url({"url": URL, "detail": 5}), "detail: Expected `str | null`, got `int`"),
    (chat({"type": "image", "image": URL}), "supported are text and image_url"),
    (responses(), SEND_DATA),
    (responses(image_url=None), SEND_DATA),
    (responses(image_url=""), SEND_DATA),
    (responses(image_url={"url": URL}), "image_url: Expected `str | null`, got `object`"),
    (responses(image_url="data:,"), NO_BASE64),
    (responses(image_url=TEXT_URL), NO_IMAGE),
    (responses(image_url=URL, detail="most"), "known are auto, low, high, original"),
    (responses(file_id="file-1"), "files are not kept; send the picture itself"),
    (responses("assistant", image_url=URL), "has a content part of type 'input_image'"),
    (messages(None), SOURCES),
    (messages({}), SOURCES),
    (messages("AAAA"), SOURCES),
    (messages({"type": "disk"}), "has a source of type 'disk'; send the picture itself"),
    (messages({"type": "file", "file_id": "file_1"}), "files are not kept"),
    (messages({"type": "base64"}), "source.data is empty; send a picture's bytes"),
    (base64_source(5), "Expected `str | null`, got `int`"),
    (base64_source(""), "is empty; send a picture's bytes"),
    (base64_source("AAAA", "text/plain"), NO_IMAGE),
    (messages({"type": "url"}), f"source.url {SEND_DATA}"),
    (messages({"type": "url", "url": "file:///x.png"}), "addresses are not fetched"),
    (messages(SOURCE, "assistant"), IN_USER),
    (
        ("/v1/messages", {"max_tokens": 9, "system": [BLOCK], "messages": said(role="user")}),
        IN_USER,
    ),
    (ollama("AAAA"), "messages[0].images: Expected `array | null`, got `str`"),
    (ollama([5]), "messages[0].images[0]: Expected `str`, got `int`"),
    (ollama([None]), "messages[0].images[0]: Expected `str`, got `null`"),
    (ollama([""]), "messages[0].images[0] is empty; send a picture's bytes in base64"),
    (ollama(["/tmp/cat.png"]), "messages[0].images[0] is no base64"),
    (ollama([TEXT_URL]), NO_IMAGE),
    (generate("AAAA"), "images: Expected `array | null`, got `str`"),
    (generate([5]), "images[0]: Expected `str`, got `int`"),
    (generate([""]), "images[0] is empty"),
]


@pytest.mark.parametrize(("request_", "told"), ODD)
async def test_what_is_no_picture_is_said_with_what_to_send(
    serve: Serve, request_: tuple[str, dict[str, Any]], told: str
) -> None:
    path, fields = request_
    async with serve() as running:
        answer = await running.http.post(path, json={"model": "echo", **fields})
        assert answer.status_code == 400
        body = answer.json()
        error = body["error"]
        if path.startswith("/api/"):
            assert told in error
        else:
            assert told in error["message"]
            assert error["type"] == "invalid_request_error"
        if path == "/v1/messages":
            assert body["type"] == "error"
        elif path.startswith("/v1/"):
            assert error["param"] == ("input" if path == "/v1/responses" else "messages")
        assert running.idle()


@pytest.mark.parametrize("fields", [ollama(None), ollama([]), generate(None), generate([])])
async def test_no_images_are_a_text(serve: Serve, fields: tuple[str, dict[str, Any]]) -> None:
    path, body = fields
    async with serve() as running:
        answer = await running.http.post(path, json={"model": "echo", "stream": False, **body})
        assert answer.status_code == 200


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
