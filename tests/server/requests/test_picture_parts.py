"""Pictures of a request's body: their bytes, and what is left beside them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from appliance.errors import ImageError, RequestError
from appliance.media.pictures import Pictures
from appliance.media.processor_config import image_processor_of
from appliance.pictures import of_base64, of_url, read_pictures
from appliance.server.http.errors import BodyTooLargeError
from appliance.server.requests.prompt import check_texts

DATA = bytes(range(256)) * 100


@pytest.mark.parametrize("lines", [False, True])
def test_a_body_may_exceed_the_limit_by_its_pictures_alone(lines: bool) -> None:
    encode = base64.encodebytes if lines else base64.b64encode
    url = f"data:image/png;base64,{encode(DATA).decode()}"
    body = json.dumps({"text": "x" * 1000, "url": url})
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "image", "image": of_url(url, "here")}]},
    ]
    check_texts(turns, len(body), 1200)
    with pytest.raises(BodyTooLargeError, match="at most 100 bytes beside its pictures"):
        check_texts(turns, len(body), 100)
    check_texts([], 500, 500)
    with pytest.raises(BodyTooLargeError):
        check_texts([], 501, 500)


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(DATA).decode(),
        base64.encodebytes(DATA).decode(),
        base64.urlsafe_b64encode(DATA).decode().rstrip("="),
        "data:image/jpeg;charset=utf-8;base64," + base64.b64encode(DATA).decode(),
        "DATA:;base64,\n" + base64.b64encode(DATA).decode(),
    ],
)
def test_base64_is_read_as_clients_write_it(text: str) -> None:
    assert of_base64(text, "here").data == DATA


def test_other_texts_are_refused() -> None:
    with pytest.raises(ImageError, match="here is no base64"):
        of_base64("§" * 8, "here")
    for url in ("file:///etc/passwd", "ftp://example.org/a.png"):
        with pytest.raises(RequestError, match="addresses are not fetched"):
            of_url(url, "here")


def test_an_address_is_refused_where_nothing_is_fetched() -> None:
    turns = [{"role": "user", "content": [of_url("https://example.org/cat.png", "here").part]}]
    spec = image_processor_of(
        {"image_processor_type": "Qwen2VLImageProcessor"}, {}, {"model_type": "qwen3_vl"}
    )
    reader = Pictures(spec)
    with pytest.raises(RequestError, match=r"here is 'https://example.org/cat.png'; send the pict"):
        read_pictures(turns, reader)
