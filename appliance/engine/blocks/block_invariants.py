"""What must hold of a block manager's books at any time, recomputed from the block tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from appliance.events import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.sequence import Sequence


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Assert that the books agree.

    Args:
        blocks: the manager.
        sequences: all that hold blocks.
    """
    holders = list(sequences)
    references = Counter(block for holder in holders for block in holder.block_table)
    active = set(references)
    free, cached = set(blocks._free), set(blocks._cached)
    assert not blocks._sources, "the plan was not settled"
    assert blocks.loading <= active, "content is on its way into a block that nobody holds"
    assert len(free) == len(blocks._free), "a block is twice in the free list"
    states = len(free) + len(cached) + len(active)
    assert states == blocks.num_blocks, "a block is lost or has two states"
    assert free | cached | active == set(range(blocks.num_blocks)), "a block has two states"
    assert blocks._references == [references[block] for block in range(blocks.num_blocks)]
    assert blocks.num_shared == sum(count > 1 for count in references.values())
    assert blocks.kv_tokens == sum(blocks._filled[block] for block in active)

    blocks._open.check_invariants(
        {b for b in active | cached if blocks._filled[b] < blocks.block_size}
    )
    assert set(blocks._cached_open) == {block for block in cached if block in blocks._open}
    blocks.index.check_invariants()
    assert all(block in blocks.index for block in cached), "a cached block cannot be found"
    assert not any(block in blocks.index for block in free), "a free block can be found"
    for holder in holders:
        table, num_full = holder.block_table, holder.num_computed // blocks.block_size
        assert len(set(table)) == len(table), "a block is twice in a block table"
        assert blocks.blocks_for(holder.num_computed) <= len(table)
        if blocks._prefix_caching:
            assert len(holder.block_hashes) >= num_full
    states_of = {
        **dict.fromkeys(free, BlockState.FREE),
        **dict.fromkeys(cached, BlockState.CACHED),
        **{block: blocks._active_state(block) for block in active},
    }
    owners: dict[int, set[int]] = {block: {0} for block in range(blocks.num_blocks)}
    for holder in holders:
        for block in holder.block_table:
            owners[block].add(holder.slot)
    precisions = {block: int(block in blocks._open) for block in range(blocks.num_blocks)}
    blocks.metadata.check_invariants(states_of, references, precisions, owners)
