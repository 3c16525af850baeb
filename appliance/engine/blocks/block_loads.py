"""Blocks whose content comes from outside the cache: given now, filled by the plan, then found.

A part of the block manager, in a file of its own. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.plan import BlockMove

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.plan import HeldBlock
    from appliance.engine.sequence import Sequence


def load_blocks(
    blocks: BlockManager, sequence: Sequence, held: list[HeldBlock], num_tokens: int
) -> list[BlockMove]:
    """Give a sequence blocks for its next tokens, which come from outside the cache.

    Nobody else finds them before `confirm_loads`, since it is only then that they are there.

    Args:
        blocks: the manager; so many are free.
        sequence: all of its blocks are full.
        held: content of one block after the other.
        num_tokens: in all of them; the sequence's `num_computed` grows by so many.

    Returns:
        What is to be loaded.
    """
    size, moves = blocks.block_size, []
    for index, one in enumerate(held):
        block, filled = blocks._take(sequence), min(size, num_tokens - index * size)
        blocks._filled[block] = filled
        blocks.kv_tokens += filled
        if filled == size:
            blocks._open.release(block)
        blocks.loading.add(block)
        blocks._record_active(block, sequence.slot)
        sequence.block_table.append(block)
        moves.append(BlockMove(block, one, blocks.open_page(block)))
    sequence.num_computed += num_tokens
    return moves


def confirm_loads(blocks: BlockManager, sequence: Sequence, first: int) -> None:
    """Record that what was promised for a sequence's blocks from index `first` on is there."""
    for index in range(first, len(sequence.block_table)):
        block = sequence.block_table[index]
        if block in blocks.loading:
            blocks.loading.remove(block)
            blocks._record_active(block, blocks.metadata.owner(block))
            if blocks._filled[block] == blocks.block_size and blocks._prefix_caching:
                blocks.index.add(sequence, index, block, blocks.block_size)
