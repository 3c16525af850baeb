"""Divides attention among programs, once per step for all layers.

The spans of decode rows are cut on the device from the lengths there: a launch depends on nothing
that the host knows of them, so a captured graph can be replayed for others. Keys are cut at fixed
positions, so a row's result depends neither on its neighbours nor on the other rows of its
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.rows.ragged import RaggedBatch


# A span is one program's share of the keys; its length depends on the bounds that it lies between.
# Early spans are short, because a program takes its pages one after another. Late ones are long, to
# keep partial results small beside the keys: 2 KiB for four heads of 128 is 6 % of 256 tokens at 4
# bits. Lengths are multiples of 128, so no tile of keys straddles two spans.
SPAN_BOUNDS = (0, 1024, 16384, 65536, 1 << 30)
SPAN_LENGTHS = (128, 256, 512, 1024)
FAN_IN = 16  # partial results that are merged at a time
MAX_ROWS = 16  # of a sequence in decode
SPAN_COLUMNS = 5  # see `DecodeSpans.table`
TILE_ROWS = 128  # query rows of a prefill tile; programs divide them by the size of their group
NO_TILE = (0, 1 << 30)  # behind all rows of any sequence
MAX_KV_HEADS = 128


@dataclass(frozen=True, slots=True)
class DecodeSpans:
    """The spans of one step's decode rows, for all layers with one window.

    Attributes:
        table: (capacity, SPAN_COLUMNS) int32: sequence, first key, last key + 1, which span it is
            from the start of the context, and how many sequences from this one on share it. Only
            the first `count` mean anything.
        count: (1,) int32.
        ends: (num_decodes, 2) int32, the first and the last span of each sequence.
        max_groups: most groups of FAN_IN spans of a sequence.
        arrived: (num_decodes, 1 + max_groups, shares) int32, zero: programs count in it who has
            finished, and leave zeros; by number of shares, KV heads times tiles of rows.
    """

    table: Tensor
    count: Tensor
    ends: Tensor
    max_groups: int
    arrived: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        batch: the step it was made for.
        tiles: (num_tiles, 2) int32, prefill: sequence, first row among its rows.
        spans: of decode rows, by window and by how many sequences one pass may serve; made for the
            first layer that asks for them.
    """

    batch: RaggedBatch
    tiles: Tensor
    spans: dict[tuple[int | None, int], DecodeSpans] = field(default_factory=dict)


def span_of(position: int) -> int:
    """Return the span of a position, as `spans_kernel.span_of` does."""
    levels = zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=False)
    return sum(max(min(position, end) - begin, 0) // length for begin, end, length in levels)


def most_spans(tokens: int, rows: int = 1, window: int | None = None) -> int:
    """Return the most spans for the keys of some rows, in a context of up to so many tokens."""
    most = span_of(max(tokens, 1) - 1) + 1
    if window is None:
        return most
    return min(most, -(-(window + rows - 1) // min(SPAN_LENGTHS)) + 1)


def prefill_tiles(query_lens: Sequence[int], first: int) -> NDArray[np.int32]:
    """Return the tiles of all chunks, (num_tiles, 2); sequences before `first` are decoded."""
    tiles = [
        (sequence, row)
        for sequence in range(first, len(query_lens))
        for row in range(0, query_lens[sequence], TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
