"""Encodes frames of streams: server-sent events, or lines."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

# Some readers end lines at NEL, LINE and PARAGRAPH SEPARATOR, so escape them.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
_encode = msgspec.json.Encoder().encode


def data_frame(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def event_frame(kind: str, content: Any) -> bytes:
    """Encode one frame of a stream with named events."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


def line_frame(content: Any) -> bytes:
    """Encode one frame of a stream of lines."""
    data = msgspec.json.encode(content)
    for end, escaped in _LINE_ENDS:
        data = data.replace(end, escaped)
    return data + b"\n"


class FrameTemplate:
    """Frames that differ in one text; encodes the rest once.

    Args:
        frame: one such frame, with `MARK` in place of the text.
    """

    MARK = secrets.token_hex(16)  # unguessable for clients and models

    def __init__(self, frame: bytes) -> None:
        self._around = frame.split(msgspec.json.encode(self.MARK))

    def fill(self, text: str) -> bytes:
        return _encode(text).join(self._around)


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol's form of a stream.

    Attributes:
        keep_alive: bytes that clients ignore.
        frame: encodes a body, for an error in mid-stream.
        frame_end: bytes that end a frame, and only that.
    """

    media_type: str = "text/event-stream"
    keep_alive: bytes = b": keep-alive\n\n"
    frame: Callable[[Any], bytes] = data_frame
    frame_end: bytes = b"\n\n"


SERVER_SENT_EVENTS = Wire()
