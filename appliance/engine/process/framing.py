"""Encodes messages: a 4-byte little-endian length, then MessagePack of one closed union."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from appliance.errors import ApplianceError, EngineError

MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")


class FrameError(EngineError):
    """The peer sent invalid bytes; the connection must end."""


def encode_frame(message: msgspec.Struct) -> bytes:
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    size = len(frame) - _LENGTH.size
    assert size <= MAX_FRAME_BYTES, f"a {type(message).__name__} of {size} bytes"
    _LENGTH.pack_into(frame, 0, size)
    return bytes(frame)


class FrameDecoder(Generic[MessageT]):
    """Splits a byte stream into messages of one union and keeps an incomplete rest."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Add bytes; return the messages they complete.

        Raises:
            FrameError: a frame is too long or not of the union.
        """
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are accepted")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, payload: bytes) -> MessageT:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ApplianceError, ValueError, RecursionError) as error:
            raise FrameError(f"a frame that is no message: {error}") from error
