"""Finds the rows of a step that pass through each sequence's state, from numbers of the host.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from appliance.kernels.recurrence.variant import CHUNK, FEWEST_CHUNKED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


class HostSpans(NamedTuple):
    """The spans of a step, (num_spans,) each; see `StateSpans`."""

    slots: NDArray[np.int64]
    goes_on: NDArray[np.bool_]
    firsts: NDArray[np.int64]
    lens: NDArray[np.int64]

    @classmethod
    def of(
        cls, slots: Sequence[int], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> HostSpans:
        """Find the spans of a step's sequences.

        The pieces of a sequence that sealed blocks cut are joined again; sequences without rows
        have none.
        """
        rows = np.array(query_lens)
        kept = rows.nonzero()[0]
        slot, ends, rows = np.array(slots)[kept], np.array(context_lens)[kept], rows[kept]
        starts = ends - rows
        begins = np.ones(len(rows), dtype=bool)
        begins[1:] = (slot[1:] != slot[:-1]) | (starts[1:] != ends[:-1])
        new = begins.nonzero()[0]
        lens = np.add.reduceat(rows, new)
        return cls(slot[new], starts[new] > 0, (rows.cumsum() - rows)[new], lens)

    def chunks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the span of each chunk and the first chunk of each span; short spans have none."""
        counts = np.where(self.lens >= FEWEST_CHUNKED, -(-self.lens // CHUNK), 0)
        return np.repeat(np.arange(len(counts)), counts), counts.cumsum() - counts

    def padded(self, num_spans: int, num_chunks: int, spare: int) -> dict[str, NDArray[Any]]:
        """Return the parts of `SpanRows`, filled up to so many.

        Args:
            spare: the slot of spans that fill up.
        """
        chunk_spans, chunk_starts = self.chunks()

        def filled(values: NDArray[Any], count: int, rest: int) -> NDArray[Any]:
            return np.append(values, np.full(count - len(values), rest, values.dtype))

        return {
            "span_slots": filled(self.slots, num_spans, spare),
            "span_goes_on": filled(self.goes_on, num_spans, False),
            "span_firsts": filled(self.firsts, num_spans, 0),
            "span_lens": filled(self.lens, num_spans, 0),
            "chunk_spans": filled(chunk_spans, num_chunks, num_spans - 1),
            "chunk_starts": filled(chunk_starts, num_spans, len(chunk_spans)),
        }


@dataclass(frozen=True, slots=True)
class SpanRows:
    """The spans of a padded step, on its device; see `StateSpans`.

    Those that only fill up come last, have no rows and share a slot that nobody reads. Chunks that
    only fill up lie behind the rows of the last span.
    """

    span_slots: Tensor  # (num_spans,) int64
    span_goes_on: Tensor  # (num_spans,) bool
    span_firsts: Tensor  # (num_spans,) int64
    span_lens: Tensor  # (num_spans,) int64
    chunk_spans: Tensor  # (num_chunks,) int64
    chunk_starts: Tensor  # (num_spans,) int64


def most_chunks(num_rows: int, num_spans: int) -> int:
    """Return the most chunks of so many rows of so many sequences."""
    return num_rows // CHUNK + num_spans
