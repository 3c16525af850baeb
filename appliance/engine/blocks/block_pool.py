"""The blocks of one KV cache: references, content and order of eviction.

Knows sequences only by their slot in block metadata. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from appliance.events import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from appliance.engine.blocks.block_metadata import BlockMetadata
    from appliance.engine.blocks.prefix_cache import PrefixCache


class BlockPool:
    """Free, cached and active blocks; see `BlockManager`.

    Args:
        metadata: records the state of blocks.
        num_open: open blocks; 0 without sealed blocks.

    Attributes:
        references: number of block tables by block.
        filled: number of tokens by block.
        loading: active blocks whose content has not arrived.
        kv_tokens: tokens in active blocks.
        num_shared: blocks in several block tables.
        num_evictions: cached blocks evicted so far.
        on_evict: called with hash and block before evicting the last block with a full content.
        on_lost: called with the hash after `on_evict`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        metadata: BlockMetadata,
        index: PrefixCache,
        num_open: int,
    ) -> None:
        self.references = [0] * num_blocks
        self.filled = [0] * num_blocks
        self.open = OpenBlocks(num_open)
        self.loading: set[int] = set()
        self.kv_tokens = 0
        self.num_shared = 0
        self.num_evictions = 0
        self.on_evict: Callable[[bytes, int], None] | None = None
        self.on_lost: Callable[[bytes], None] | None = None
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._metadata = metadata
        self._index = index
        self._free = list(reversed(range(num_blocks)))  # a stack, lowest id on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._cached_open: OrderedDict[int, None] = OrderedDict()  # with an open block
        self._copied: set[int] = set()  # sources of copies in the plan being made
        self._sources: list[int] = []  # those of them that no block table holds any more

    @property
    def num_available(self) -> int:
        """Blocks available for allocation: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks kept only for their content."""
        return len(self._cached)

    def is_own(self, block: int) -> bool:
        """Return True if the block's only holder may write to it."""
        return self.references[block] == 1 and block not in self._index

    def take(self, slot: int) -> int:
        """Make a block active, evicting the least recently used content if necessary."""
        if self.open.is_exhausted and self._cached_open:
            self._evict(next(iter(self._cached_open)))
        if not self._free:
            self._evict(next(iter(self._cached)))
        block = self._free.pop()
        self.references[block] = 1
        self.filled[block] = 0
        self.open.claim(block)
        self._record_active(block, slot)
        return block

    def share(self, block: int, slot: int) -> None:
        references = self.references[block] + 1
        self.references[block] = references
        if references == 1:
            del self._cached[block]
            self._cached_open.pop(block, None)
            self.kv_tokens += self.filled[block]
        elif references == 2:
            self.num_shared += 1
        self._record_active(block, slot)

    def fill(self, block: int, num_tokens: int) -> None:
        before, size = self.filled[block], self._block_size
        self.kv_tokens += num_tokens - before
        self.filled[block] = num_tokens
        if num_tokens == size:
            self.open.release(block)
        if (num_tokens == size) != (before == size):
            self._record_active(block, self._metadata.owner(block))

    def expect(self, block: int, num_tokens: int) -> None:
        """Mark a block just taken as waiting for tokens from outside."""
        self.loading.add(block)
        self._record_active(block, self._metadata.owner(block))
        self.fill(block, num_tokens)

    def arrive(self, block: int) -> None:
        self.loading.remove(block)
        self._record_active(block, self._metadata.owner(block))

    def touch(self, block: int) -> None:
        if block in self._cached:
            self._cached.move_to_end(block)

    def copy_from(self, block: int, slot: int) -> None:
        """Drop a reference to a block that the plan being made copies from."""
        self._copied.add(block)
        self.let_go(block, slot)

    def settle(self) -> None:
        """Release the sources of a complete plan's copies.

        Earlier, a source could become another copy's destination in the same plan.
        """
        self._copied.clear()
        while self._sources:
            self.let_go(self._sources.pop(), 0)

    def let_go(self, block: int, slot: int) -> None:
        """Drop a sequence's reference, by slot, to a block."""
        if self.references[block] == 1 and block in self._copied:
            self._copied.remove(block)
            self._sources.append(block)
            return
        references = self.references[block] - 1
        self.references[block] = references
        owner = self._metadata.owner(block)
        if references:
            self.num_shared -= references == 1
            # Any remaining holder may be the owner.
            owner = 0 if owner == slot else owner
            self._record_active(block, owner)
            return
        self.kv_tokens -= self.filled[block]
        self.loading.discard(block)
        if self._index.is_found(block):
            self._cached[block] = None
            if block in self.open:
                self._cached_open[block] = None
            self._metadata.write(block, BlockState.CACHED, precision=block in self.open)
        else:
            if block in self._index:
                self._index.remove(block)
            self.open.release(block)
            self._free.append(block)
            self._metadata.write(block, BlockState.FREE)

    def _evict(self, block: int) -> None:
        del self._cached[block]
        self._cached_open.pop(block, None)
        content = self._index.remove(block)
        if content and self.on_evict is not None and self.filled[block] == self._block_size:
            self.on_evict(content, block)
        if content and self.on_lost is not None:
            self.on_lost(content)
        self.open.release(block)
        self._free.append(block)
        self.num_evictions += 1

    def _record_active(self, block: int, owner: int) -> None:
        """Record a block's holder, once per change of hands and once when it is full."""
        self._metadata.write(
            block, self._active_state(block), owner, self.references[block], block in self.open
        )

    def _active_state(self, block: int) -> BlockState:
        if block in self.loading:
            return BlockState.LOADING
        is_open = self.references[block] == 1 and self.filled[block] < self._block_size
        return BlockState.WRITING if is_open else BlockState.ACTIVE

    def check_invariants(self, holders: Mapping[int, list[int]]) -> None:
        """Recompute everything and assert that the records agree.

        Args:
            holders: slots of the sequences that hold each block.
        """
        blocks, active = range(self._num_blocks), set(holders)
        free, cached = set(self._free), set(self._cached)
        assert not self._sources, "the plan was not settled"
        assert self.loading <= active, "content is on its way into a block that nobody holds"
        assert len(free) == len(self._free), "a block is twice in the free list"
        states = len(free) + len(cached) + len(active)
        assert states == self._num_blocks, "a block is lost or has two states"
        assert free | cached | active == set(blocks), "a block has two states"
        assert self.references == [len(holders.get(block, ())) for block in blocks]
        assert self.num_shared == sum(len(slots) > 1 for slots in holders.values())
        assert self.kv_tokens == sum(self.filled[block] for block in active)
        self.open.check_invariants(
            {block for block in active | cached if self.filled[block] < self._block_size}
        )
        assert set(self._cached_open) == {block for block in cached if block in self.open}
        self._index.check_invariants()
        assert all(map(self._index.is_found, cached)), "a cached block cannot be found"
        assert not any(block in self._index for block in free), "a free block can be found"
        states_of = {
            **dict.fromkeys(free, BlockState.FREE),
            **dict.fromkeys(cached, BlockState.CACHED),
            **{block: self._active_state(block) for block in active},
        }
        self._metadata.check_invariants(
            states_of,
            {block: len(slots) for block, slots in holders.items()},
            {block: int(block in self.open) for block in blocks},
            {block: {0, *holders.get(block, ())} for block in blocks},
        )


class OpenBlocks:
    """Maps partial blocks to open blocks, which hold their tokens until they are full and sealed.

    Args:
        num_open: size of the pool; 0 without sealed blocks.
    """

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self._free = list(reversed(range(num_open)))
        self._open_of: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self._num_open > 0

    def __contains__(self, block: int) -> bool:
        return block in self._open_of

    def __getitem__(self, block: int) -> int:
        return self._open_of[block]

    @property
    def is_exhausted(self) -> bool:
        """True if a pool exists and all of it is in use."""
        return not self._free and self._num_open > 0

    def get(self, block: int) -> int:
        return self._open_of.get(block, -1)

    def claim(self, block: int) -> None:
        """Give a block an open block, if there is a pool."""
        if self._num_open:
            assert block not in self._open_of, f"block {block} has an open block"
            assert self._free, "more blocks are written than `num_open_blocks` counted"
            self._open_of[block] = self._free.pop()

    def release(self, block: int) -> None:
        """Take back a block's open block, if it has one."""
        held = self._open_of.pop(block, None)
        if held is not None:
            self._free.append(held)

    def check_invariants(self, writable: Collection[int]) -> None:
        """Assert that exactly the partial blocks have an open block, and that none is lost."""
        if self._num_open:
            assert set(self._open_of) == set(writable), "open blocks of blocks that are not partial"
        known = [*self._free, *self._open_of.values()]
        assert sorted(known) == list(range(self._num_open)), "an open block is lost or shared"


def num_open_blocks(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, *, plans: int = 1
) -> int:
    """Return a number of open blocks that never runs out.

    A running sequence holds one for each of its partial blocks. If n of its tokens are in plans,
    these are at most (n + block_size - 2) // block_size + 1 blocks, and the tokens of all sequences
    are at most the budget of each plan. A sequence that begins with a copy of a block needs one
    more: the source keeps its own until the plan is complete.
    """
    return plans * max_num_batched_tokens // block_size + 3 * max_num_seqs
