"""Chunks with token counts, for streams of the OpenAI routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.config import ServerConfig
    from appliance.server.requests.schema import SamplingFields


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
