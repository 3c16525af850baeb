"""Divides attention among programs, once per step for all layers.

The spans of decode rows are cut on the device from the lengths there: a launch depends on nothing
that the host knows of them, so a captured graph can be replayed for others. Keys are cut at fixed
positions, so a row's result depends neither on its neighbours nor on the other rows of its
sequence, unless the longest one would have too many spans for the step's rows: then all spans of
the step are longer by one power of two.
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
# bits. Lengths are multiples of 128, so no tile of keys straddles two spans. They are computed;
# `timed_spans` corrects them on a card.
SPAN_BOUNDS = (0, 1024, 16384, 65536, 1 << 30)
SPAN_LENGTHS = (128, 256, 512, 1024)
# Most partial results of a head in one layer: rows of a step times spans of its longest context.
# Those of 32 heads of 128 take 68 MB. 17 rows over 131,072 tokens have no more.
MOST_PARTIALS = 4096
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
        most: spans that a sequence may have.
        num_partials: room for partial results of a head, at least `most` for each row.
        arrived: (num_decodes, 1 + max_groups, shares) int32, zero: programs count in it who has
            finished, and leave zeros; by number of shares, KV heads times tiles of rows.
    """

    table: Tensor
    count: Tensor
    ends: Tensor
    most: int
    num_partials: int
    arrived: dict[int, Tensor] = field(default_factory=dict)

    @property
    def max_groups(self) -> int:
        """Most groups of FAN_IN spans of a sequence; a window may begin inside one."""
        return -(-self.most // FAN_IN) + 1


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        batch: the step it was made for.
        tiles: (num_tiles, 2) int32, prefill: sequence, first row among its rows.
        lengths: of spans, between SPAN_BOUNDS.
        spans: of decode rows, by window and by how many sequences one pass may serve; made for the
            first layer that asks for them.
    """

    batch: RaggedBatch
    tiles: Tensor
    lengths: tuple[int, ...] = SPAN_LENGTHS
    spans: dict[tuple[int | None, int], DecodeSpans] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Most rows of all sequences that decode.

        Where drafts are verified, few of the sequences have as many rows as they may.
        """
        batch = self.batch
        return min(batch.num_decodes * batch.decode_rows, len(batch.slot_mapping))


def span_of(position: int, lengths: tuple[int, ...] = SPAN_LENGTHS) -> int:
    """Return the span of a position, as `spans_kernel.span_of` does."""
    levels = zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], lengths, strict=False)
    return sum(max(min(position, end) - begin, 0) // length for begin, end, length in levels)


def most_spans(
    tokens: int,
    rows: int = 1,
    window: int | None = None,
    lengths: tuple[int, ...] = SPAN_LENGTHS,
) -> int:
    """Return the most spans for the keys of some rows, in a context of up to so many tokens."""
    most = span_of(max(tokens, 1) - 1, lengths) + 1
    if window is None:
        return most
    return min(most, -(-(window + rows - 1) // min(lengths)) + 1)


def most_partials(
    num_rows: int,
    tokens: int,
    rows: int = 1,
    window: int | None = None,
    lengths: tuple[int, ...] = SPAN_LENGTHS,
) -> int:
    """Return the most partial results of a head in a step; more rows or tokens never have fewer.

    Args:
        num_rows: of all sequences that decode.
        tokens: of the longest context.
        rows: of a sequence.
        window: latest positions that a row sees; None is all.
        lengths: of spans; shorter ones have more results, up to the same most.
    """
    most = num_rows * most_spans(tokens, rows, window, lengths)
    return min(most, max(MOST_PARTIALS, num_rows))


def prefill_tiles(query_lens: Sequence[int], first: int) -> NDArray[np.int32]:
    """Return the tiles of all chunks, (num_tiles, 2); sequences before `first` are decoded."""
    tiles = [
        (sequence, row)
        for sequence in range(first, len(query_lens))
        for row in range(0, query_lens[sequence], TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
