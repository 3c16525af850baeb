from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.nouns.messages import Abort, Shutdown, Submit, ToEngine
from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.framing import (
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    FrameDecoder,
    FrameError,
    encode_frame,
)
from appliance.media.sizing import Canvas

MESSAGES: list[ToEngine] = [
    Submit(
        Request(
            request_id="a",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(n=2, stop=("x",), logit_bias={5: -1.5}),
        )
    ),
    Abort("a"),
    Abort("a", 1),
    Shutdown(),
]


@given(st.lists(st.integers(1, 200)))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    stream = b"".join(encode_frame(message) for message in MESSAGES)
    received: list[ToEngine] = []
    for cut in [*cuts, len(stream)]:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert received == MESSAGES


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",  # never used in MessagePack
        msgspec.msgpack.encode({"type": "Load"}),
        msgspec.msgpack.encode({"type": "Exec", "code": "1"}),
        msgspec.msgpack.encode({"type": "Abort", "request_id": 5}),
        msgspec.msgpack.encode(
            {
                "type": "Submit",
                "request": {"request_id": "a", "prompt_token_ids": [1], "sampling": {"n": 10**9}},
            }
        ),
        msgspec.msgpack.encode({"type": "Abort", "request_id": "a"}) + b"\0",
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    with pytest.raises(FrameError, match="no message"):
        decoder.feed(struct.pack("<I", len(payload)) + payload)


def test_a_long_frame_is_refused_before_it_is_there() -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    with pytest.raises(FrameError, match="bytes"):
        decoder.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_request_may_have_photographs() -> None:
    pixels = bytes(4 << 20) * 5
    canvas = CanvasPixels(b"key", Canvas(((2048, 2048),)), pixels, (1, 1))
    pictures = PromptPictures((canvas,), (PictureSpan(0, 1, 0),))
    request = Request(
        request_id="a", prompt_token_ids=(0,), sampling=SamplingParams(), pictures=pictures
    )
    frame = encode_frame(Submit(request), MAX_REQUEST_BYTES)
    assert len(frame) > MAX_FRAME_BYTES
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine, MAX_REQUEST_BYTES)
    assert not decoder.feed(frame[: len(frame) // 2])
    assert decoder.feed(frame[len(frame) // 2 :]) == [Submit(request)]
