"""Sizes of the largest step, for allocating inputs and workspace once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.run.cuda_graphs import step_sizes
from appliance.engine.run.staging import StepShape
from appliance.kernels.attention.work import TILE_ROWS
from appliance.kernels.host_spans import most_chunks

if TYPE_CHECKING:
    from appliance.engine.nouns.limits import SchedulerLimits


def largest_step(
    limits: SchedulerLimits,
    block_size: int,
    *,
    is_sealed: bool,
    is_recurrent: bool = False,
    is_padded: bool = True,
    is_adapted: bool = False,
) -> StepShape:
    """Return the sizes of the largest step, with tables for all blocks of a context.

    Args:
        is_padded: a step may be padded, to more rows than are scheduled at most.
    """
    rows, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    width = -(-limits.context_length // block_size)
    # Then entries are cut at blocks, and each piece has its own open block.
    pieces = num_open_blocks(num_seqs, rows, block_size) if is_sealed else num_seqs
    num_samples, tiles, spans = limits.sample_rows, 0, 0
    if is_padded:
        sizes = step_sizes(limits, is_recurrent=is_recurrent)
        cut = block_size if is_sealed else None
        pieces = max(pieces, *(size.num_singles + size.num_prompts(cut) for size in sizes))
        num_samples = max(num_samples, *(size.num_samples for size in sizes))
        rows = max(rows, *(size.num_rows for size in sizes))
        tiles = pieces + rows // TILE_ROWS
        spans = num_samples if is_recurrent else 0
    return StepShape(
        *(rows, pieces, num_samples, width, is_sealed, is_recurrent, is_adapted, tiles),
        num_spans=spans,
        num_chunks=most_chunks(rows, spans) if spans else 0,
    )


def fixed_bytes(largest: StepShape, vocab_size: int) -> int:
    """Return the fixed device memory: inputs, tables, logits, token counts."""
    tables = 4 * largest.num_seqs * largest.table_width
    return largest.num_bytes + tables + largest.num_samples * (16 + 8 * vocab_size)
