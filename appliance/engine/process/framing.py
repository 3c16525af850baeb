"""Encodes messages: a 4-byte little-endian length, then MessagePack of one closed union.

Splits a report that exceeds a frame: prompt scores multiply with alternatives.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from appliance.engine.nouns.messages import StepReport
from appliance.engine.nouns.picture import MOST_PIXEL_BYTES
from appliance.errors import ApplianceError, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.nouns.messages import SequenceDelta


# Per report. Each takes up to 15 bytes of MessagePack, so a frame has at most half of its 16 MiB.
MAX_CANDIDATES = 2**19
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_REQUEST_BYTES = MOST_PIXEL_BYTES + MAX_FRAME_BYTES
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
MessageT = TypeVar("MessageT")


class FrameError(EngineError):
    """The peer sent invalid bytes; the connection must end."""


def encode_frame(message: msgspec.Struct, most: int = MAX_FRAME_BYTES) -> bytearray:
    """Return a message's frame.

    Args:
        most: bytes of the message.
    """
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    size = len(frame) - _LENGTH.size
    assert size <= most, f"a {type(message).__name__} of {size} bytes"
    _LENGTH.pack_into(frame, 0, size)
    return frame


class FrameDecoder(Generic[MessageT]):
    """Splits a byte stream into messages of one union and keeps an incomplete rest.

    Args:
        most: bytes of a message.
    """

    def __init__(self, union: Any, most: int = MAX_FRAME_BYTES) -> None:
        self._most = most
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self.rest = bytearray()  # of a frame that is not complete

    def feed(self, data: bytes | bytearray) -> list[MessageT]:
        """Add bytes; return the messages they complete.

        Raises:
            FrameError: a frame is too long or not of the union.
        """
        self.rest += data
        messages = []
        start = 0
        while len(self.rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self.rest, start)
            if size > self._most:
                raise FrameError(f"a frame of {size} bytes; at most {self._most} are accepted")
            end = start + _LENGTH.size + size
            if len(self.rest) < end:
                break
            with memoryview(self.rest) as whole, whole[start + _LENGTH.size : end] as payload:
                messages.append(self._decode(payload))
            start = end
        del self.rest[:start]
        return messages

    def _decode(self, payload: memoryview) -> MessageT:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ApplianceError, ValueError, RecursionError) as error:
            raise FrameError(f"a frame that is no message: {error}") from error


def pieces_of(report: StepReport, most: int = MAX_CANDIDATES) -> Iterator[StepReport]:
    """Yield reports that together equal this one; nearly always it alone.

    Args:
        most: log probabilities per piece; those of one token stay together.
    """
    if sum(map(_num_candidates, report.deltas)) <= most:
        yield report
        return
    held: list[SequenceDelta] = []
    room = most
    started = report.started
    for whole in report.deltas:
        for delta in _cut(whole, most):
            if held and room < _num_candidates(delta):
                yield StepReport(deltas=tuple(held), started=started)
                held, room, started = [], most, ()
            held.append(delta)
            room -= _num_candidates(delta)
    yield replace(report, deltas=tuple(held), started=started)


def _num_candidates(delta: SequenceDelta) -> int:
    return sum(
        len(tokens) * (1 + len(tokens[0].top))
        for tokens in (delta.logprobs, delta.prompt_logprobs)
        if tokens
    )


def _cut(delta: SequenceDelta, most: int) -> Iterator[SequenceDelta]:
    """Split a prompt's scores; the last part has the rest of the delta."""
    scores = delta.prompt_logprobs
    if not scores or _num_candidates(delta) <= most:
        yield delta
        return
    step = max(1, most // (1 + len(scores[0].top)))
    last = (len(scores) - 1) // step * step
    for start in range(0, last, step):
        yield type(delta)(
            request_id=delta.request_id,
            index=delta.index,
            num_cached_tokens=delta.num_cached_tokens,
            prompt_logprobs=scores[start : start + step],
        )
    yield replace(delta, prompt_logprobs=scores[last:])
