"""Encodes frames of server-sent events, and names what a protocol does differently."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data_frame(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def event_frame(kind: str, content: Any) -> bytes:
    """Encode one frame of a stream with named events."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


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
    """

    media_type: str = "text/event-stream"
    keep_alive: bytes = b": keep-alive\n\n"
    frame: Callable[[Any], bytes] = data_frame


SERVER_SENT_EVENTS = Wire()
