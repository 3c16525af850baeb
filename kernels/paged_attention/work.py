"""Which program computes what, decided on the host once per step and shared by all layers.

A row's result has to depend on its own sequence alone, so the keys of a decode row are cut by its
context length, never by how many other rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch

# A span is one program's share of a decode row's keys: long enough that its partial result costs
# little beside the keys (3 % at 256 of head_dim 128), and never so many that merging them shows.
MIN_SPAN = 256
MAX_SPANS = 64
SPAN_STEP = 128  # spans begin at multiples of it, so that tiles of keys never straddle two
TILE_ROWS = 128  # query rows of a prefill tile; programs divide them by the size of their group
COLUMNS = 4  # of int32: every row of the table is 16 bytes, so every part of it is aligned
EMPTY = -1  # sequence of a row that holds no work


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        batch: the step it was made for.
        spans: (num_spans, 4) int32, decode: sequence, first key, last key + 1, and the row of the
            partial results, or -1 if the span is its row's only one.
        merges: (num_merges, 4) int32, decode: sequence, first partial result, how many, 0.
        tiles: (num_tiles, 4) int32, prefill: sequence, first row among its rows, 0, 0.
        num_partials: rows that the partial results need.
    """

    batch: RaggedBatch
    spans: Tensor
    merges: Tensor
    tiles: Tensor
    num_partials: int


def plan_attention(
    batch: RaggedBatch, block_size: int, *, span_capacity: int | None = None
) -> AttentionWork:
    """Lay out one step's work.

    Args:
        batch: the step.
        block_size: token slots in a block; the tables are the same for any.
        span_capacity: fix the sizes of all decode tables, by this many spans and one merge for
            each decode row; what is left over stays empty. So a captured graph can be replayed
            for other context lengths.

    Returns:
        The tables, copied to the batch's device in one piece.
    """
    assert block_size > 0
    contexts = np.array(batch.host_context_lens[: batch.num_decodes], dtype=np.int32)
    counts, lengths = span_counts(contexts)
    spans, merges = _decode_tables(contexts, counts, lengths)
    num_partials = int(counts[counts > 1].sum())
    if span_capacity is not None:
        assert len(spans) <= span_capacity, (len(spans), span_capacity)
        spans = _fill_up(spans, span_capacity)
        merges = _fill_up(merges, batch.num_decodes)
        num_partials = span_capacity
    tiles = _prefill_table(batch)
    table = torch.from_numpy(np.concatenate((spans, merges, tiles)))
    table = table.to(batch.query_start.device, non_blocking=True)
    first_merge, first_tile = len(spans), len(spans) + len(merges)
    return AttentionWork(
        batch=batch,
        spans=table[:first_merge],
        merges=table[first_merge:first_tile],
        tiles=table[first_tile:],
        num_partials=num_partials,
    )


def span_counts(contexts: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How many spans each context is cut into, and their length, the last one's excepted."""
    wanted = np.clip(-(-contexts // MIN_SPAN), 1, MAX_SPANS)
    lengths = -(-contexts // (wanted * SPAN_STEP)) * SPAN_STEP
    return -(-contexts // lengths), lengths


def _decode_tables(
    contexts: NDArray[np.int32], counts: NDArray[np.int32], lengths: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    sequence = np.repeat(np.arange(len(contexts), dtype=np.int32), counts)
    index = np.arange(len(sequence), dtype=np.int32) - np.repeat(_starts(counts), counts)
    begin = index * lengths[sequence]
    end = np.minimum(begin + lengths[sequence], contexts[sequence])
    several = counts > 1
    first_partial = _starts(np.where(several, counts, 0))
    partial = np.where(several[sequence], first_partial[sequence] + index, EMPTY)
    spans = np.stack((sequence, begin, end, partial), axis=1).astype(np.int32)
    merged = np.flatnonzero(several)
    zero = np.zeros_like(merged)
    merges = np.stack((merged, first_partial[merged], counts[merged], zero), axis=1)
    return spans, merges.astype(np.int32)


def _prefill_table(batch: RaggedBatch) -> NDArray[np.int32]:
    tiles = [
        (sequence, row, 0, 0)
        for sequence in range(batch.num_decodes, batch.num_seqs)
        for row in range(0, batch.host_query_lens[sequence], TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, COLUMNS)


def _starts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where each one begins if they stand in a row: the sums of those before."""
    return (np.cumsum(counts) - counts).astype(np.int32)


def _fill_up(table: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    empty = np.full((rows - len(table), COLUMNS), EMPTY, dtype=np.int32)
    return np.concatenate((table, empty))
