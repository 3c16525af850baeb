"""The division of attention among programs, prepared once per step for all layers.

The spans of decode rows are cut on the device, from the lengths that lie there: nothing that the
host knows about them goes into a launch, so a captured graph can be replayed for others. Keys are
cut at fixed positions, so a row's result depends neither on its neighbours nor on the rows that
its own sequence has beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch

# A span is one program's share of the keys; its length goes by the bounds that it lies between.
# Early ones are short, because a program takes its pages one after another; late ones are long, for
# a partial result, 2 KiB for four heads of 128, would else be too much beside the keys: 6 % of 256
# tokens at 4 bits. Each a multiple of 128, so that no tile of keys straddles two spans.
SPAN_BOUNDS = (0, 1024, 16384, 65536, 1 << 30)
SPAN_LENGTHS = (128, 256, 512, 1024)
FAN_IN = 16  # partial results that are merged at a time
MAX_ROWS = 16  # of a sequence in decode
MEMBERS = 16  # sequences that may share a span
SPAN_COLUMNS = 4 + MEMBERS  # int32: first key, last key + 1, span, how many sequences, and which
TILE_ROWS = 128  # query rows of a prefill tile; programs divide them by the size of their group
NO_TILE = (0, 1 << 30)  # behind all rows of any sequence
MAX_KV_HEADS = 128


@dataclass(frozen=True, slots=True)
class DecodeSpans:
    """The spans of one step's decode rows, for all layers with one window.

    Attributes:
        table: (capacity, SPAN_COLUMNS) int32: first key, last key + 1, which span it is from the
            start of the context, and the sequences that share it. Only the first `count` mean
            anything.
        count: (1,) int32.
        places: (num_decodes, 3) int32: among partial results that of a sequence's span 0, which
            there need not be, and its first and last span.
        max_groups: of FAN_IN spans, that a sequence has at most.
        arrived: (num_decodes, 1 + max_groups, shares) int32, zero: programs count in it who has
            finished, and leave zeros; by number of shares, KV heads times tiles of rows.
    """

    table: Tensor
    count: Tensor
    places: Tensor
    max_groups: int
    arrived: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        batch: the step it was made for.
        tiles: (num_tiles, 2) int32, prefill: sequence, first row among its rows.
        spans: of decode rows, by window and by how many sequences one pass over a span can serve;
            made when the first such layer asks for them.
    """

    batch: RaggedBatch
    tiles: Tensor
    spans: dict[tuple[int | None, int], DecodeSpans] = field(default_factory=dict)


def span_of(position: int) -> int:
    """The span that a position lies in, as `attention_spans.kernel.span_of` has it."""
    levels = zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=False)
    return sum(max(min(position, end) - begin, 0) // length for begin, end, length in levels)


def most_spans(tokens: int, rows: int = 1, window: int | None = None) -> int:
    """Spans that the keys of some rows may lie in, of a context of up to so many tokens."""
    most = span_of(max(tokens, 1) - 1) + 1
    if window is None:
        return most
    return min(most, -(-(window + rows - 1) // min(SPAN_LENGTHS)) + 1)


def prefill_tiles(query_lens: Sequence[int], first: int) -> NDArray[np.int32]:
    """The tiles of all chunks: (num_tiles, 2); sequences before the first are not prefill."""
    tiles = [
        (sequence, row)
        for sequence in range(first, len(query_lens))
        for row in range(0, query_lens[sequence], TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
