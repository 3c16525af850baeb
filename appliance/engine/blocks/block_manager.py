"""Which sequence holds which blocks of the KV cache: on demand, shared, copied on write, cached.

It owns `block_table`, `block_hashes` and `num_computed` of every sequence and knows nothing of
requests' order or of tensors. Every operation is O(1) amortised per block. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_invariants import check_blocks
from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.open_pages import OpenPages
from appliance.engine.blocks.prefix_cache import Prefix, PrefixCache
from appliance.engine.plan import BlockCopy
from appliance.events import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Sequences

    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.sequence import Sequence


class BlockManager:
    """All blocks of one KV cache.

    A block is free (no content), cached (content that no sequence refers to, least recently used
    first to go) or active (in at least one block table), which is said to be written while one
    sequence alone holds it and it has room. A full block enters the prefix cache once it is
    computed, a last block that is not full when its sequence lets go of it. Where equal content is
    indexed already, both stay, since block tables only grow; the second one is plainly freed.

    A block is written by a sequence only while no other sequence refers to it and the prefix
    cache does not index it; otherwise `allocate` gives the sequence a copy.

    Where blocks are sealed, one that is not full has an open page, also while it is only cached.
    Nobody writes to a full one, not even to a copy: its first tokens cannot be had alone.

    Args:
        num_blocks: physical blocks.
        block_size: token slots in a block.
        metadata: where to record what happens to blocks; None keeps a private record.
        prefix_caching: whether the content of full blocks is kept and found again.
        namespace: whatever else decides the bytes in a block, such as weights and KV format.
        num_open: open pages, see `open_pages.num_open_pages`; 0 where blocks are not sealed.

    Attributes:
        index: which block holds which content.
        kv_tokens: slots of active blocks that hold a token.
        num_shared: blocks that stand in more than one block table.
        num_evictions: blocks whose cached content was given up, ever.
        on_evict: called with hash and block before the content of a full block is given up.
        loading: active blocks whose content is still outside, see `block_loads`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        metadata: BlockMetadata | None = None,
        prefix_caching: bool = True,
        namespace: str = "",
        num_open: int = 0,
    ) -> None:
        assert min(num_blocks, block_size) > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.metadata = metadata or BlockMetadata(num_blocks=num_blocks)
        self.kv_tokens = 0
        self.num_shared = 0
        self.num_evictions = 0
        self.on_evict: Callable[[bytes, int], None] | None = None
        self._prefix_caching = prefix_caching
        self.index = PrefixCache(block_size, namespace, splits_full=num_open == 0)
        self._open = OpenPages(num_open)
        self._references = [0] * num_blocks
        self._filled = [0] * num_blocks  # slots that hold a token
        self._free = list(reversed(range(num_blocks)))  # a stack, lowest id on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._cached_open: OrderedDict[int, None] = OrderedDict()  # of these with an open page
        self._copied: set[int] = set()  # sources of the copies of the plan that is being made
        self._sources: list[int] = []  # those of them that no block table refers to any more
        self.loading: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks kept only for their content."""
        return len(self._cached)

    @property
    def num_active(self) -> int:
        """Blocks that stand in a block table."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens take."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that the sequence's tokens still need."""
        return self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)

    def cost_of_admission(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that it takes to attach `prefix` and give blocks to all other tokens.

        What a copy is made of is among them, and free again once the plan is `settled`.
        """
        unreferenced = sum(not self._references[block] for block in prefix.blocks)
        num_new = self.blocks_for(len(sequence.token_ids)) - len(prefix.blocks)
        return num_new + unreferenced + self._needs_copy(prefix)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Blocks that hold the sequence's first tokens already.

        The last token is never part of a hit: it must be run to get logits.
        """
        finds = self._prefix_caching or sequence.num_kept
        return self.index.find(sequence) if finds else Prefix()

    def without_copy(self, prefix: Prefix) -> Prefix:
        """As much of a prefix as can be attached and written behind without a copy."""
        return self.whole(prefix) if self._needs_copy(prefix) else prefix

    def whole(self, prefix: Prefix) -> Prefix:
        """The full blocks of a prefix."""
        num_full = prefix.num_tokens // self.block_size
        return Prefix(prefix.blocks[:num_full], num_full * self.block_size)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start a sequence's block table with blocks that `find_prefix` returned just now."""
        if prefix.num_tokens % self.block_size and not self._needs_copy(prefix):
            self.index.remove(prefix.blocks[-1])  # it goes on where another ended
        self._share(sequence, prefix.blocks)
        sequence.num_computed = prefix.num_tokens

    def _needs_copy(self, prefix: Prefix) -> bool:
        """Whether a prefix ends in a block that holds more, or belongs to others."""
        num_tokens = prefix.num_tokens % self.block_size
        if num_tokens == 0:
            return False
        last = prefix.blocks[-1]
        return bool(self._references[last]) or self._filled[last] != num_tokens

    def open_page(self, block: int) -> int:
        """The open page of a block, or -1."""
        return self._open.get(block)

    def num_held(self, sequence: Sequence) -> int:
        """Tokens whose content is there: a last block that was to be copied may hold nothing."""
        num_full, num_last = divmod(sequence.num_computed, self.block_size)
        is_empty = num_last and self._filled[sequence.block_table[num_full]] < num_last
        return sequence.num_computed - (num_last if is_empty else 0)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child` share the blocks of the first `num_tokens` tokens, equal in both.

        Nothing is copied until one of them writes to a block that both hold. Of a sealed block
        nothing is shared if it is not shared as a whole: the child computes its part again.
        """
        assert num_tokens <= parent.num_computed
        if self._open and num_tokens % self.block_size:
            index = num_tokens // self.block_size
            if parent.block_table[index] not in self._open:
                num_tokens = index * self.block_size
        self._share(child, parent.block_table[: self.blocks_for(num_tokens)])
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]
        child.num_computed = num_tokens

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make the slots of the next `num_new_tokens` tokens writable.

        Returns:
            Copies to be done before anything is written, mostly none; or None, and nothing has
            changed, if there are not enough free blocks.
        """
        table = sequence.block_table
        first = sequence.num_computed // self.block_size
        if num_new_tokens == 1 and first < len(table) and self._is_own(table[first]):
            return ()  # as for most answers in most steps
        num_blocks = self.blocks_for(sequence.num_computed + num_new_tokens)
        present = range(first, min(num_blocks, len(table)))
        kept = [index for index in present if not self._is_own(table[index])]
        num_appended = max(0, num_blocks - len(table))
        if not (kept or num_appended):
            return ()
        if len(kept) + num_appended > self.num_free_blocks:
            return None
        # All destinations are taken before a source is let go, so that none becomes the other.
        copies = tuple(self._copy(table[index], self._take(sequence)) for index in kept)
        table.extend(self._take(sequence) for _ in range(num_appended))
        for index, copy in zip(kept, copies, strict=True):
            table[index] = copy.destination
            self._copied.add(copy.source)
            self._let_go(copy.source, sequence.slot)
        return copies

    def _is_own(self, block: int) -> bool:
        """Whether the one sequence that holds a block may write to it."""
        return self._references[block] == 1 and block not in self.index

    def settle(self) -> None:
        """A plan is complete: what it copies from may be given to others from now on.

        Before that it could become the destination of another of the plan's copies.
        """
        self._copied.clear()
        while self._sources:
            self._let_go(self._sources.pop(), 0)

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the next `num_tokens` tokens are in the cache and index full blocks."""
        size, first = self.block_size, sequence.num_computed // self.block_size
        sequence.num_computed = end = sequence.num_computed + num_tokens
        if num_tokens == 1 and end % size:  # as for most answers in most steps
            block = sequence.block_table[first]
            if (before := self._filled[block]) < size:
                self.kv_tokens += end % size - before
                self._filled[block] = end % size
                return
        for index in range(first, self.blocks_for(end)):
            block = sequence.block_table[index]
            filled, before = min(end - index * size, size), self._filled[block]
            self.kv_tokens += filled - before
            self._filled[block] = filled
            if filled == size:
                self._open.release(block)
            if (filled == size) != (before == size):
                self._record_active(block, self.metadata.owner(block))
        if self._prefix_caching and end // size > first:
            self.index.extend_hashes(sequence, end // size)
            for index in range(first, end // size):
                self.index.add(sequence, index, sequence.block_table[index], size)

    def open_pages(
        self, scheduled: Iterable[ScheduledSequence]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Of each entry those of the blocks that its rows lie in; None if nothing is sealed."""
        if not self._open:
            return None
        size = self.block_size
        pages = []
        for entry in scheduled:
            table = entry.sequence.block_table[entry.start // size : self.blocks_for(entry.end)]
            pages.append(tuple([self._open[block] for block in table]))
        return tuple(pages)

    def _copy(self, source: int, destination: int) -> BlockCopy:
        if not self._open:
            return BlockCopy(source, destination)
        return BlockCopy(source, destination, self._open[source], self._open[destination])

    def free(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; those with findable content stay as cache."""
        table = sequence.block_table
        keeps = self._prefix_caching or sequence.num_kept
        num_full, num_last = divmod(self.num_held(sequence), self.block_size)
        # Tail before head, so that eviction shortens a chain and never cuts it in the middle.
        for index in reversed(range(len(table))):
            if not keeps:
                pass
            elif index < num_full:
                self._touch(sequence, index)
            elif self._prefix_caching and index == num_full and num_last >= self.index.min_partial:
                self._keep_last(sequence, index, num_last)
            self._let_go(table[index], sequence.slot)
        table.clear()
        sequence.num_computed = 0

    def _touch(self, sequence: Sequence, index: int) -> None:
        """Keep a chain whole where the index holds, or has lost, an equal block of another's."""
        indexed = self.index.get(sequence.block_hashes[index])
        if indexed is None:
            self.index.add(sequence, index, sequence.block_table[index], self.block_size)
        elif indexed in self._cached:
            self._cached.move_to_end(indexed)

    def _keep_last(self, sequence: Sequence, index: int, num_tokens: int) -> None:
        """Index a block that is not full, if it is the sequence's own."""
        block = sequence.block_table[index]
        if self._references[block] == 1 and block not in self.index:
            self.kv_tokens -= self._filled[block] - num_tokens
            self._filled[block] = num_tokens
            self.index.add(sequence, index, block, num_tokens)

    def _share(self, sequence: Sequence, blocks: Sequences[int]) -> None:
        assert not sequence.block_table
        for block in blocks:
            references = self._references[block] + 1
            self._references[block] = references
            if references == 1:
                del self._cached[block]
                self._cached_open.pop(block, None)
                self.kv_tokens += self._filled[block]
            elif references == 2:
                self.num_shared += 1
            self._record_active(block, sequence.slot)
        sequence.block_table.extend(blocks)

    def _take(self, sequence: Sequence) -> int:
        """Make a block active, at the price of the least recently used content if need be."""
        if self._open.is_exhausted and self._cached_open:
            self._evict(next(iter(self._cached_open)))
        if not self._free:
            self._evict(next(iter(self._cached)))
        block = self._free.pop()
        self._references[block] = 1
        self._filled[block] = 0
        self._open.claim(block)
        self._record_active(block, sequence.slot)
        return block

    def _evict(self, block: int) -> None:
        """Give up the content of a cached block."""
        del self._cached[block]
        self._cached_open.pop(block, None)
        content = self.index.remove(block)
        if self.on_evict is not None and self._filled[block] == self.block_size:
            self.on_evict(content, block)
        self._open.release(block)
        self._free.append(block)
        self.num_evictions += 1

    def _record_active(self, block: int, owner: int) -> None:
        """Write down who holds a block, once per change of hands and once when it is full."""
        self.metadata.write(
            block, self._active_state(block), owner, self._references[block], block in self._open
        )

    def _active_state(self, block: int) -> BlockState:
        if block in self.loading:
            return BlockState.LOADING
        is_open = self._references[block] == 1 and self._filled[block] < self.block_size
        return BlockState.WRITING if is_open else BlockState.ACTIVE

    def _let_go(self, block: int, slot: int) -> None:
        """Drop the reference that the sequence of a slot has to a block."""
        if self._references[block] == 1 and block in self._copied:
            self._copied.remove(block)
            self._sources.append(block)
            return
        references = self._references[block] - 1
        self._references[block] = references
        owner = self.metadata.owner(block)
        if references:
            self.num_shared -= references == 1
            # Which of the others is the owner now is not worth remembering.
            owner = 0 if owner == slot else owner
            self._record_active(block, owner)
        else:
            self.kv_tokens -= self._filled[block]
            self.loading.discard(block)
            if block in self.index:
                self._cached[block] = None
                if block in self._open:
                    self._cached_open[block] = None
                self.metadata.write(block, BlockState.CACHED, precision=block in self._open)
            else:
                self._open.release(block)
                self._free.append(block)
                self.metadata.write(block, BlockState.FREE)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Recompute everything from the block tables and assert that the books agree.

        Args:
            sequences: all that hold blocks.
        """
        check_blocks(self, sequences)
