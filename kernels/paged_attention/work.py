"""Which program computes what, prepared once per step and shared by all layers.

The spans of decode rows are cut on the device, from the context lengths that lie there: nothing
that the host knows about them goes into a launch, so a captured graph can be replayed for others.
A row's keys are cut by its own context alone, and so its result depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch

# A span is one program's share of a decode row's keys. Short contexts are cut finely, because a
# program takes its pages one after another; in long ones a partial result, 2 KiB for four heads of
# 128, would else be too much beside the keys: 6 % of 256 tokens at 4 bits. Each a multiple of 128,
# so that no tile of keys straddles two spans.
MIN_SPAN = 128
LONG_SPAN = 256  # for contexts of more than LONG_CONTEXT
LONG_CONTEXT = 8 * MIN_SPAN
MAX_SPANS = 64
TILE_ROWS = 128  # query rows of a prefill tile; programs divide them by the size of their group
SPAN_COLUMNS = 4  # int32: sequence, first key, last key + 1, row of the partial results
MAX_KV_HEADS = 128  # counters that a decode row has


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        batch: the step it was made for.
        spans: (capacity, 4) int32, decode: sequence, first key, last key + 1, and the row of the
            partial results. Only the first `num_spans` mean anything.
        num_spans: (1,) int32.
        arrived: (num_decodes * MAX_KV_HEADS,) int32, zero: programs count in it who has finished,
            and leave zeros.
        tiles: (num_tiles, 2) int32, prefill: sequence, first row among its rows.
    """

    batch: RaggedBatch
    spans: Tensor
    num_spans: Tensor
    arrived: Tensor
    tiles: Tensor


def most_spans(tokens: int) -> int:
    """Spans that a context of up to so many tokens may be cut into."""
    short = min(-(-tokens // MIN_SPAN), LONG_CONTEXT // MIN_SPAN)
    return max(1, short, min(-(-tokens // LONG_SPAN), MAX_SPANS))


def prefill_tiles(batch: RaggedBatch) -> NDArray[np.int32]:
    """The tiles of all chunks: (num_tiles, 2)."""
    tiles = [
        (sequence, row)
        for sequence in range(batch.num_decodes, batch.num_seqs)
        for row in range(0, batch.host_query_lens[sequence], TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
