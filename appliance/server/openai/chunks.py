"""The chunks of a stream of the OpenAI routes, and which of them carry token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from appliance.server.http.frames import DONE, data_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from msgspec import UnsetType

    from appliance.config import ServerConfig
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Usage
    from appliance.server.requests.pieces import Piece
    from appliance.server.requests.schema import SamplingFields

ChoiceT = TypeVar("ChoiceT")


class Chunk(Protocol[ChoiceT]):
    """A chunk of a chat or of a text completion."""

    choices: list[ChoiceT]
    usage: Usage | UnsetType | None


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """The chunks of a stream that carry token counts.

    Attributes:
        at_end: a last chunk has the whole answer's counts.
        in_chunks: every chunk has the counts so far, of all choices.
    """

    at_end: bool = False
    in_chunks: bool = False

    @classmethod
    def of(cls, body: SamplingFields, config: ServerConfig) -> StreamUsage:
        """Read `stream_options`, and the setting that adds counts to every stream."""
        options = body.stream_options
        at_end = config.force_include_usage or (options is not None and bool(options.include_usage))
        in_chunks = at_end and options is not None and bool(options.continuous_usage_stats)
        return cls(at_end, in_chunks)


class Chunks(Generic[ChoiceT]):
    """Encodes the chunks of one stream, which differ in their choice and counts.

    Args:
        chunk: one of them, which this changes and encodes.
    """

    def __init__(self, chunk: Chunk[ChoiceT], answer: Answer, usage: StreamUsage) -> None:
        self._chunk = chunk
        self._answer = answer
        self._usage = usage

    def frame(self, choice: ChoiceT) -> bytes:
        self._chunk.choices = [choice]
        return data_frame(self._chunk)

    def count(self, piece: Piece) -> None:
        """Let the next chunks carry the counts up to a piece, if any chunk does."""
        if self._usage.in_chunks:
            self._chunk.usage = self._answer.usage_at(piece.completion_tokens)

    async def frames(self, frames_of: Callable[[Piece], bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the frames of all pieces, then usage and [DONE].

        Args:
            frames_of: makes the frames of a piece, with `frame` and `count`.
        """
        if self._usage.at_end:
            self._chunk.usage = self._answer.usage_at(0) if self._usage.in_chunks else None
        async for pieces in self._answer.pieces():
            yield b"".join(map(frames_of, pieces))
        if self._usage.at_end:
            self._chunk.choices = []
            self._chunk.usage = self._answer.usage()
            yield data_frame(self._chunk)
        yield DONE
