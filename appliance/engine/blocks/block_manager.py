"""Assigns KV cache blocks to sequences: on demand, shared, copied on write, cached.

Owns every sequence's `block_table`, `block_hashes` and `num_computed`; knows neither scheduling
order nor tensors. Every operation is O(1) amortised per block. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.block_pool import BlockPool
from appliance.engine.blocks.prefix_cache import Prefix, PrefixCache
from appliance.engine.nouns.moves import BlockCopy

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable
    from collections.abc import Sequence as Sequences

    from appliance.engine.blocks.state_slots import StateSlots
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence


class BlockManager:
    """All blocks of one KV cache.

    A block is free (no content), cached (content without a sequence, evicted least recently used
    first) or active (in at least one block table). A sequence writes to an active block that it
    alone holds and that has room. A full block enters the prefix cache when computed; a partial
    last block, when its sequence is freed. Block tables only grow, so two blocks with equal content
    both stay; the later one is freed without being cached, unless the first was evicted and it took
    its place.

    A sequence writes to a block only if no other sequence refers to it and the prefix cache does
    not index it; otherwise `allocate` gives the sequence a copy.

    A model with recurrent layers also needs a state to continue from. So prefixes end at a
    checkpoint, partial blocks are not shared, and evicting a block drops its checkpoint; see
    `StateSlots`.

    With sealed blocks, a partial block has an open block, even while only cached. A full block is
    never written, not even as a copy: its first tokens cannot be read alone.

    Args:
        metadata: records the state of blocks; None keeps a private record.
        prefix_caching: keep and find the content of full blocks.
        namespace: other facts that determine a block's bytes, such as weights and KV format.
        num_open: open blocks, see `block_pool.num_open_blocks`; 0 without sealed blocks.
        states: the rows of recurrent state; None without recurrent layers.
        holds_copies: blocks only count what sequences hold elsewhere, each a copy of its own, so
            none stays shared after a fork.

    Attributes:
        metadata: the state of each block.
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
        states: StateSlots | None = None,
        holds_copies: bool = False,
    ) -> None:
        assert min(num_blocks, block_size) > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.metadata = metadata or BlockMetadata(num_blocks=num_blocks)
        self._prefix_caching = prefix_caching
        self.index = PrefixCache(block_size, namespace, splits_full=num_open == 0)
        self.pool = BlockPool(num_blocks, block_size, self.metadata, self.index, num_open)
        self.states = states
        self._holds_copies = holds_copies
        self._forked: set[Sequence] = set()  # those whose blocks another may hold, of such
        if states is not None:
            self.pool.on_lost = states.checkpoints.evict
        self._open = self.pool.open
        self._filled = self.pool.filled

    @property
    def num_free_blocks(self) -> int:
        """Blocks available for allocation: free and cached."""
        return self.pool.num_available

    @property
    def num_cached(self) -> int:
        """Blocks kept only for their content."""
        return self.pool.num_cached

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, sequence: Sequence) -> int:
        """Count the blocks that the sequence's tokens still need, without drafts."""
        return max(0, self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table))

    def cost_of_admission(self, sequence: Sequence, prefix: Prefix) -> int:
        """Count the free blocks needed to attach `prefix` and allocate all other tokens.

        Includes the source of a copy, which is free again once the plan is settled.
        """
        unreferenced = sum(not self.pool.references[block] for block in prefix.blocks)
        num_new = self.blocks_for(len(sequence.token_ids)) - len(prefix.blocks)
        return num_new + unreferenced + self._needs_copy(prefix)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Return the blocks that already hold the sequence's first tokens.

        Excludes the last token: it must run to give logits.
        """
        finds = self._prefix_caching or sequence.num_kept
        if not finds:
            return Prefix()
        return self.index.find(sequence) if self.states is None else self._find_state(sequence)

    def _find_state(self, sequence: Sequence) -> Prefix:
        """Return the blocks up to the last checkpoint of the sequence's chain."""
        assert self.states is not None
        chain = self.index.find_chain(sequence)
        hashes, size = sequence.block_hashes, self.block_size
        depth = self.states.checkpoints.depth(hashes[: len(chain)])
        checkpoint = hashes[depth - 1] if depth else b""
        return Prefix(tuple(chain[:depth]), depth * size, checkpoint, len(chain) * size)

    def without_copy(self, prefix: Prefix) -> Prefix:
        """Shorten a prefix so that the sequence can continue without a copy."""
        return self.whole(prefix) if self._needs_copy(prefix) else prefix

    def whole(self, prefix: Prefix) -> Prefix:
        num_full, num_last = divmod(prefix.num_tokens, self.block_size)
        if not num_last:
            return prefix
        return Prefix(prefix.blocks[:num_full], num_full * self.block_size)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start a sequence's block table with the result of `find_prefix`."""
        if prefix.num_tokens % self.block_size and not self._needs_copy(prefix):
            self.index.remove(prefix.blocks[-1])  # the sequence continues where another ended
        self._share(sequence, prefix.blocks)
        sequence.num_computed = prefix.num_tokens
        sequence.num_alike = prefix.num_alike
        if prefix.checkpoint:
            assert self.states is not None
            self.states.restore(sequence, prefix.checkpoint)

    def _needs_copy(self, prefix: Prefix) -> bool:
        """Return True if a prefix ends in a block with more tokens or other holders."""
        num_tokens = prefix.num_tokens % self.block_size
        if num_tokens == 0:
            return False
        last = prefix.blocks[-1]
        return bool(self.pool.references[last]) or self._filled[last] != num_tokens

    def open_block(self, block: int) -> int:
        return self._open.get(block)

    def num_held(self, sequence: Sequence) -> int:
        """Count the tokens with content; a block that waits for its copy may be empty."""
        num_full, num_last = divmod(sequence.num_computed, self.block_size)
        is_empty = num_last and self._filled[sequence.block_table[num_full]] < num_last
        return sequence.num_computed - (num_last if is_empty else 0)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Share the blocks of the first `num_tokens` tokens, equal in both, with `child`.

        Copies nothing until one of them writes to a shared block. Shares a sealed block only as a
        whole; otherwise the child recomputes its part. With recurrent state the child continues
        where the parent is, or at an earlier checkpoint.
        """
        assert num_tokens <= parent.num_computed
        if self.states is not None and num_tokens < parent.num_computed:
            hashes = parent.block_hashes[: num_tokens // self.block_size]
            num_tokens = self.states.checkpoints.depth(hashes) * self.block_size
        if self._open and num_tokens % self.block_size:
            index = num_tokens // self.block_size
            if parent.block_table[index] not in self._open:
                num_tokens = index * self.block_size
        if self._holds_copies:
            self._forked |= {parent, child}
        self._share(child, parent.block_table[: self.blocks_for(num_tokens)])
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]
        child.num_computed = num_tokens
        if self.states is None or num_tokens == 0:
            return
        if num_tokens == parent.num_computed:
            self.states.fork(parent, child)
        else:
            self.states.restore(child, child.block_hashes[-1])

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make the slots of the next `num_new_tokens` tokens writable.

        Returns:
            Copies to make before any write, usually none; None, with nothing changed, if there are
                too few
            free blocks.
        """
        table, size = sequence.block_table, self.block_size
        first = sequence.num_computed // size
        num_blocks = -(-(sequence.num_computed + num_new_tokens) // size)
        if is_forked := sequence in self._forked:
            first = 0
        if first + 1 == num_blocks <= len(table) and self.pool.is_own(table[first]):
            return ()  # the usual case: most answers in most steps
        present = range(first, min(num_blocks, len(table)))
        kept = [index for index in present if not self.pool.is_own(table[index])]
        num_appended = max(0, num_blocks - len(table))
        if len(kept) + num_appended > self.num_free_blocks:
            return None
        if is_forked:
            self._forked.remove(sequence)
        if not (kept or num_appended):
            return ()
        # Take all destinations before releasing a source, so none becomes the other.
        take, slot = self.pool.take, sequence.slot
        copies = tuple(self._copy(table[index], take(slot)) for index in kept)
        table.extend(take(slot) for _ in range(num_appended))
        for index, copy in zip(kept, copies, strict=True):
            table[index] = copy.destination
            self.pool.copy_from(copy.source, slot)
            if index < sequence.num_computed // size:
                self.pool.fill(copy.destination, size)  # nothing else will
        return copies

    def settle(self) -> None:
        """Release the sources of a complete plan's copies; see `BlockPool.settle`."""
        self.pool.settle()

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Record the next `num_tokens` tokens as computed, and index full blocks."""
        size, first = self.block_size, sequence.num_computed // self.block_size
        sequence.num_computed = end = sequence.num_computed + num_tokens
        if num_tokens == 1 and end % size:  # the usual case: most answers in most steps
            block = sequence.block_table[first]
            if (before := self._filled[block]) < size:
                self.pool.kv_tokens += end % size - before
                self._filled[block] = end % size
                return
        for index in range(first, self.blocks_for(end)):
            self.pool.fill(sequence.block_table[index], min(end - index * size, size))
        if self._prefix_caching and end // size > first:
            self.index.extend_hashes(sequence, end // size)
            for index in range(first, end // size):
                self.index.add(sequence, index, sequence.block_table[index], size)
            if self.states is not None:
                self.states.confirm(sequence, end, size)

    def truncate(self, sequence: Sequence) -> None:
        """Release the blocks after a sequence's computed tokens, allocated for rejected rows."""
        table = sequence.block_table
        for _ in range(len(table) - self.blocks_for(sequence.num_computed)):
            self.pool.let_go(table.pop(), sequence.slot)

    def open_blocks(
        self, scheduled: Iterable[ScheduledSequence]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return the open blocks that each entry writes; None without sealed blocks."""
        if not self._open:
            return None
        size = self.block_size
        found = []
        for entry in scheduled:
            table = entry.sequence.block_table[entry.start // size : self.blocks_for(entry.end)]
            found.append(tuple([self._open[block] for block in table]))
        return tuple(found)

    def _copy(self, source: int, destination: int) -> BlockCopy:
        if not self._open:
            return BlockCopy(source, destination)
        return BlockCopy(source, destination, self._open[source], self._open[destination])

    def free(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; those with findable content stay cached."""
        table, slot = sequence.block_table, sequence.slot
        keeps = self._prefix_caching or sequence.num_kept
        num_full, num_last = divmod(self.num_held(sequence), self.block_size)
        keeps_last = self._prefix_caching and num_last >= self.index.min_partial
        if self.states is not None:
            self.states.free(sequence)
            self._forked.discard(sequence)
            keeps_last = False
        # Tail before head, so that eviction shortens a chain instead of cutting it.
        for index in reversed(range(len(table))):
            if not keeps:
                pass
            elif index < num_full:
                self._touch(sequence, index)
            elif keeps_last and index == num_full:
                self._keep_last(sequence, index, num_last)
            self.pool.let_go(table[index], slot)
        del table[:]
        sequence.num_computed = 0

    def _touch(self, sequence: Sequence, index: int) -> None:
        """Refresh an indexed block of equal content, or index this one: chains must stay whole."""
        indexed = self.index.get(sequence.block_hashes[index])
        if indexed is None:
            self.index.add(sequence, index, sequence.block_table[index], self.block_size)
        else:
            self.pool.touch(indexed)

    def _keep_last(self, sequence: Sequence, index: int, num_tokens: int) -> None:
        """Index a partial block, if it is the sequence's own."""
        block = sequence.block_table[index]
        if self.pool.is_own(block):
            self.pool.fill(block, num_tokens)
            self.index.add(sequence, index, block, num_tokens)

    def _share(self, sequence: Sequence, blocks: Sequences[int]) -> None:
        assert not sequence.block_table
        for block in blocks:
            self.pool.share(block, sequence.slot)
        sequence.block_table.extend(blocks)

    def expect(self, sequence: Sequence, num_blocks: int, num_tokens: int) -> array[int]:
        """Append blocks for a sequence's next tokens, whose content arrives from outside.

        Other sequences find them only after `confirm_loads`.

        Args:
            sequence: all of its blocks are full.
            num_blocks: blocks to append; this many are free.
            num_tokens: in all of them; added to the sequence's `num_computed`.

        Returns:
            The blocks, in token order.
        """
        first = len(sequence.block_table)
        for index in range(num_blocks):
            block = self.pool.take(sequence.slot)
            self.pool.expect(block, min(self.block_size, num_tokens - index * self.block_size))
            sequence.block_table.append(block)
        sequence.num_computed += num_tokens
        return sequence.block_table[first:]

    def confirm_loads(self, sequence: Sequence, first: int) -> None:
        """Record that the loads into a sequence's blocks, from index `first` on, have arrived."""
        for index in range(first, len(sequence.block_table)):
            block = sequence.block_table[index]
            if block in self.pool.loading:
                self.pool.arrive(block)
                if self._filled[block] == self.block_size and self._prefix_caching:
                    self.index.add(sequence, index, block, self.block_size)
        if self.states is not None:
            self.states.confirm(sequence, sequence.num_computed, self.block_size)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Recompute everything from the block tables and assert that the records agree."""
        holders: dict[int, list[int]] = {}
        holding = list(sequences)
        if self.states is not None:
            self.states.check_invariants(holding)
            lost = [one for one in self.states.checkpoints if self.index.get(one) is None]
            assert not lost, "a checkpoint is kept without its block"
        for sequence in holding:
            table, num_full = sequence.block_table, sequence.num_computed // self.block_size
            assert len(set(table)) == len(table), "a block is twice in a block table"
            assert self.blocks_for(sequence.num_computed) <= len(table)
            if self._prefix_caching:
                assert len(sequence.block_hashes) >= num_full
            for block in table:
                holders.setdefault(block, []).append(sequence.slot)
        self.pool.check_invariants(holders)
