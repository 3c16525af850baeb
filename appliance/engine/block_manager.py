"""Which sequence holds which blocks of the KV cache: on demand, shared, copied on write, cached.

It owns `block_table`, `block_hashes` and `num_computed` of every sequence and knows nothing of
requests' order or of tensors. Every operation is O(1) amortised per block. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from appliance.engine.block_metadata import BlockMetadata, unpack
from appliance.engine.open_pages import OpenPages
from appliance.engine.plan import BlockCopy, BlockMove, HeldBlock
from appliance.engine.prefix_cache import PrefixCache
from appliance.events import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.sequence import Sequence


class BlockManager:
    """All blocks of one KV cache.

    A block is free (no content), cached (content that no sequence refers to, least recently used
    first to go) or active (in at least one block table), which is said to be written while one
    sequence alone holds it and it has room. A full block enters the prefix cache
    once it is computed. Where equal content is indexed already, both blocks stay, since block
    tables only grow; the second one stays out of the index and is plainly freed.

    A block is written by a sequence only while no other sequence refers to it and the prefix
    cache does not index it; otherwise `allocate` gives the sequence a copy.

    Where blocks are sealed, one that is not full has an open page. Once it is full nobody writes
    to it any more, not even to a copy: without the open page its tokens cannot be had.

    Args:
        num_blocks: physical blocks.
        block_size: token slots in a block.
        metadata: where to record what happens to blocks; None keeps a private record.
        prefix_caching: whether the content of full blocks is kept and found again.
        namespace: whatever else decides the bytes in a block, such as weights and KV format.
        num_open: open pages, see `open_pages.num_open_pages`; 0 where blocks are not sealed.

    Attributes:
        kv_tokens: slots of active blocks that hold a token.
        num_shared: blocks that stand in more than one block table.
        num_evictions: blocks whose cached content was given up, ever.
        on_evict: called with hash and block before cached content is given up.
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
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.metadata = metadata or BlockMetadata(num_blocks=num_blocks)
        self.kv_tokens = 0
        self.num_shared = 0
        self.num_evictions = 0
        self.on_evict: Callable[[bytes, int], None] | None = None
        self._prefix_caching = prefix_caching
        self._index = PrefixCache(block_size, namespace)
        self._open = OpenPages(num_open)
        self._references = [0] * num_blocks
        self._filled = [0] * num_blocks  # slots that hold a token
        self._free = list(reversed(range(num_blocks)))  # a stack, lowest id on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._loading: set[int] = set()  # active, but their content is still outside

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

    def cost_of_admission(self, sequence: Sequence, prefix: list[int]) -> int:
        """How far `num_free_blocks` falls if all tokens get blocks and `prefix` is attached."""
        unreferenced = sum(not self._references[block] for block in prefix)
        return self.blocks_for(len(sequence.token_ids)) - len(prefix) + unreferenced

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens already.

        The last token is never part of a hit: it must be run to get logits, and leaving its block
        out means that a hit is never written to and costs no copy.
        """
        if not (self._prefix_caching or sequence.num_kept):
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        self._index.extend_hashes(sequence, num_blocks)
        return self._index.find(sequence.block_hashes[:num_blocks])

    def attach(self, sequence: Sequence, prefix: list[int]) -> None:
        """Start a sequence's block table with blocks that `find_prefix` returned just now."""
        self._share(sequence, prefix)
        sequence.num_computed = len(prefix) * self.block_size

    def load(self, sequence: Sequence, num_tokens: int) -> list[BlockMove]:
        """Give a sequence blocks for its next tokens, which come from outside the cache.

        Nobody else finds them before `confirm`, since it is only then that they are there.

        Args:
            sequence: all of its blocks are full.
            num_tokens: its `num_computed` grows by so many.

        Returns:
            For each block where its content goes.
        """
        size, moves = self.block_size, []
        for begin in range(0, num_tokens, size):
            block, filled = self._take(sequence), min(size, num_tokens - begin)
            self._filled[block] = filled
            self.kv_tokens += filled
            if filled == size:
                self._open.release(block)
            self._loading.add(block)
            self._record_active(block, sequence.slot)
            sequence.block_table.append(block)
            moves.append(BlockMove(block, HeldBlock(), self.open_page(block)))
        sequence.num_computed += num_tokens
        return moves

    def confirm(self, sequence: Sequence, first: int) -> None:
        """Record that what `load` promised for the blocks from index `first` on is there now."""
        for index in range(first, len(sequence.block_table)):
            block = sequence.block_table[index]
            if block in self._loading:
                self._loading.remove(block)
                self._record_active(block, self.metadata.owner(block))
                if self._filled[block] == self.block_size and self._prefix_caching:
                    self._index.add(sequence.block_hashes[index], block)

    def num_found(self, hashes: list[bytes]) -> int:
        """Blocks at the start of a chain that are in the cache."""
        return len(self._index.find(hashes))

    def block_of(self, content: bytes) -> int | None:
        """The block indexed under a hash."""
        return self._index.get(content)

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the sequence's `block_hashes` cover its first `num_blocks` full blocks."""
        self._index.extend_hashes(sequence, num_blocks)

    def open_page(self, block: int) -> int:
        """The open page of a block, or -1."""
        return self._open.get(block)

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
        num_blocks = self.blocks_for(sequence.num_computed + num_new_tokens)
        kept = [
            index
            for index in range(first, min(num_blocks, len(table)))
            if self._references[table[index]] > 1 or table[index] in self._index
        ]
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
            self._let_go(copy.source, sequence)
        return copies

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the next `num_tokens` tokens are in the cache and index full blocks."""
        size = self.block_size
        first = sequence.num_computed // size
        end = sequence.num_computed + num_tokens
        sequence.num_computed = end
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
            self._index.extend_hashes(sequence, end // size)
            for index in range(first, end // size):
                self._index.add(sequence.block_hashes[index], sequence.block_table[index])

    def open_pages(
        self, scheduled: Iterable[ScheduledSequence]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Of each entry those of the blocks that its rows lie in; None if nothing is sealed."""
        if not self._open:
            return None
        size = self.block_size
        return tuple(
            tuple(
                self._open[block]
                for block in entry.sequence.block_table[
                    entry.start // size : self.blocks_for(entry.end)
                ]
            )
            for entry in scheduled
        )

    def _copy(self, source: int, destination: int) -> BlockCopy:
        if not self._open:
            return BlockCopy(source, destination)
        return BlockCopy(source, destination, self._open[source], self._open[destination])

    def free(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; those with findable content stay as cache."""
        table = sequence.block_table
        keeps = self._prefix_caching or sequence.num_kept
        num_full = sequence.num_computed // self.block_size if keeps else 0
        # Tail before head, so that eviction shortens a chain and never cuts it in the middle.
        for index in reversed(range(len(table))):
            if index < num_full:
                self._touch(sequence.block_hashes[index], table[index])
            self._let_go(table[index], sequence)
        table.clear()
        sequence.num_computed = 0

    def _touch(self, content: bytes, block: int) -> None:
        """Keep a chain whole where the index holds, or has lost, an equal block of another's."""
        indexed = self._index.get(content)
        if indexed is None:
            self._index.add(content, block)
        elif indexed in self._cached:
            self._cached.move_to_end(indexed)

    def _share(self, sequence: Sequence, blocks: list[int]) -> None:
        assert not sequence.block_table
        for block in blocks:
            references = self._references[block] + 1
            self._references[block] = references
            if references == 1:
                del self._cached[block]
                self.kv_tokens += self._filled[block]
            elif references == 2:
                self.num_shared += 1
            self._record_active(block, sequence.slot)
        sequence.block_table.extend(blocks)

    def _take(self, sequence: Sequence) -> int:
        """Make a block active, at the price of the least recently used content if need be."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._index.remove(block)
            self.num_evictions += 1
            if self.on_evict is not None:
                self.on_evict(content, block)
        self._references[block] = 1
        self._filled[block] = 0
        self._open.claim(block)
        self._record_active(block, sequence.slot)
        return block

    def _record_active(self, block: int, owner: int) -> None:
        """Write down who holds a block, once per change of hands and once when it is full."""
        self.metadata.write(
            block, self._active_state(block), owner, self._references[block], block in self._open
        )

    def _active_state(self, block: int) -> BlockState:
        if block in self._loading:
            return BlockState.SWAPPED
        is_open = self._references[block] == 1 and self._filled[block] < self.block_size
        return BlockState.WRITING if is_open else BlockState.ACTIVE

    def _let_go(self, block: int, sequence: Sequence) -> None:
        """Drop one reference to a block."""
        references = self._references[block] - 1
        self._references[block] = references
        owner = self.metadata.owner(block)
        if references:
            self.num_shared -= references == 1
            # Which of the others is the owner now is not worth remembering.
            owner = 0 if owner == sequence.slot else owner
            self._record_active(block, owner)
        else:
            self.kv_tokens -= self._filled[block]
            self._loading.discard(block)
            self._open.release(block)
            if block in self._index:
                self._cached[block] = None
                self.metadata.write(block, BlockState.CACHED)
            else:
                self._free.append(block)
                self.metadata.write(block, BlockState.FREE)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Recompute everything from the block tables and assert that the books agree.

        Args:
            sequences: all that hold blocks.
        """
        holders = list(sequences)
        references = Counter(block for holder in holders for block in holder.block_table)
        active = set(references)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        states = len(free) + len(cached) + len(active)
        assert states == self.num_blocks, "a block is lost or has two states"
        assert free | cached | active == set(range(self.num_blocks)), "a block has two states"
        assert self._references == [references[block] for block in range(self.num_blocks)]
        assert self.num_shared == sum(count > 1 for count in references.values())
        assert self.kv_tokens == sum(self._filled[block] for block in active)

        self._open.check_invariants({b for b in active if self._filled[b] < self.block_size})
        self._index.check_invariants()
        assert all(block in self._index for block in cached), "a cached block cannot be found"
        assert not any(block in self._index for block in free), "a free block can be found"
        for holder in holders:
            table, num_full = holder.block_table, holder.num_computed // self.block_size
            assert len(set(table)) == len(table), "a block is twice in a block table"
            assert self.blocks_for(holder.num_computed) <= len(table)
            if self._prefix_caching:
                assert len(holder.block_hashes) >= num_full

        fields = unpack(self.metadata.words)
        slots: dict[int, set[int]] = {block: {0} for block in active}
        for holder in holders:
            for block in holder.block_table:
                slots[block].add(holder.slot)
        for block in range(self.num_blocks):
            state = (
                self._active_state(block)
                if block in active
                else BlockState.CACHED
                if block in cached
                else BlockState.FREE
            )
            assert fields.state[block] == state
            assert fields.references[block] == min(references[block], 255)
            assert fields.precision[block] == (block in self._open)
            assert int(fields.owner[block]) in slots.get(block, {0})
