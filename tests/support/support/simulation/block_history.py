"""Sequences over a block manager, with a model of the memory that its tables point into.

Whatever a block table promises can be read back. Evicted blocks go outside, by their hash, and come
back when a sequence with the same prefix is admitted.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile

from support.simulation.content_memory import Content, ContentMemory, truth
from support.simulation.content_states import ContentStates, make

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import unpack
from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.nouns.moves import BlockCopy
from appliance.engine.nouns.sequence import Sequence
from appliance.events import BlockState

MAX_SEQUENCES = 4
UNIQUE_TOKEN = 99

seen: Counter[str] = Counter()  # how often each notable case came up


class BlockHistory:
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        sealed: bool,
        rows: int,
        shuffle: random.Random,
        checkpoints: int | None,
    ) -> None:
        num_open = num_open_blocks(MAX_SEQUENCES, rows, block_size) if sealed else 0
        states = None if checkpoints is None else StateSlots(MAX_SEQUENCES, checkpoints)
        self.blocks = BlockManager(num_blocks, block_size, num_open=num_open, states=states)
        self.sealed, self.rows, self.shuffle = sealed, rows, shuffle
        self.memory = ContentMemory(self.blocks, sealed)
        self.states = ContentStates(self.blocks, shuffle, seen)
        self.holders: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.outside: dict[bytes, list[Content]] = {}
        # Of preempted sequences: the number of their tokens, and the content of the block that is
        # not full.
        self.last: dict[Sequence, tuple[int, list[Content]]] = {}
        # Of sequences whose admission loads blocks, until the step has run: index of the first
        # block, and the contents.
        self.loads: dict[Sequence, tuple[int, list[tuple[int, list[Content]]]]] = {}
        self.blocks.pool.on_evict = self.evicted
        self.slots = list(range(1, MAX_SEQUENCES + 1))
        self.steps = 0

    def holder(self, pick: int) -> Sequence:
        return self.holders[pick % len(self.holders)]

    def has_holder(self) -> bool:
        return bool(self.holders)

    def has_room(self) -> bool:
        return len(self.holders) + len(self.preempted) < MAX_SEQUENCES

    def hold(self, sequence: Sequence) -> None:
        sequence.slot = self.slots.pop()
        self.holders.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.blocks.free(sequence)
        self.holders.remove(sequence)
        self.slots.append(sequence.slot)

    def evicted(self, content: bytes, block: int) -> None:
        self.outside[content] = self.memory.full(block)

    def load(self, sequence: Sequence) -> None:
        """Continue a block table from outside; the manager counts these blocks, but finds none."""
        size = self.blocks.block_size
        first, num_last = divmod(sequence.num_computed, size)
        if num_last or self.blocks.states is not None:  # the simulation loads states
            return
        num_full = (len(sequence.token_ids) - 1) // size
        self.blocks.index.extend_hashes(sequence, num_full)
        known = takewhile(self.outside.__contains__, sequence.block_hashes[first:num_full])
        contents = [self.outside[content] for content in known]
        num_tokens = len(contents) * size
        kept, last = self.last.pop(sequence, (0, []))
        if kept and first * size + num_tokens == kept - kept % size:
            contents.append(last)
            num_tokens += kept % size
            seen["tokens loaded of a block that is not full"] += kept % size
        if not contents:
            return
        blocks = self.blocks.expect(sequence, len(contents), num_tokens)
        self.blocks.check_invariants(self.holders)
        self.loads[sequence] = first, list(zip(blocks, contents, strict=True))
        seen["blocks loaded"] += len(blocks)

    def admit(self, sequence: Sequence, fails: bool = False) -> None:
        """Attach the hit and compute at least a token, as admission does."""
        prefix = self.blocks.find_prefix(sequence)
        cost = self.blocks.cost_of_admission(sequence, prefix)
        if cost > self.blocks.num_free_blocks:
            prefix = self.blocks.without_copy(prefix)
            cost = self.blocks.cost_of_admission(sequence, prefix)
        if self.shuffle.random() < 0.5:
            whole = self.blocks.whole(prefix)  # more of it may be outside
            if (less := self.blocks.cost_of_admission(sequence, whole)) <= cost:
                prefix, cost = whole, less
        fits = cost <= self.blocks.num_free_blocks
        before = self.blocks.num_free_blocks
        self.hold(sequence)
        self.blocks.attach(sequence, prefix)
        assert sequence.num_computed == prefix.num_tokens < len(sequence.token_ids)
        seen["blocks hit"] += prefix.num_tokens // self.blocks.block_size
        partial = prefix.num_tokens % self.blocks.block_size
        seen["tokens hit of a block"] += partial
        seen["tokens hit of an open block"] += partial if self.sealed else 0
        if not fits:
            self.last.pop(sequence, None)
            return
        self.load(sequence)
        self.last.pop(sequence, None)
        sequence.num_kept = 0
        rows = min(self.rows, sequence.num_uncomputed)
        copies = self.blocks.allocate(sequence, rows)
        assert copies is not None, "the cost of admission was not enough"
        took = before - self.blocks.num_free_blocks + self.blocks.num_missing(sequence)
        assert took == cost
        if fails:
            self.fail([(sequence, rows, copies)])
        else:
            self.run([(sequence, rows, copies)])

    def fail(self, plan: list[tuple[Sequence, int, tuple[BlockCopy, ...]]]) -> None:
        """Fail a step: nothing that it wrote or copied is known."""
        self.blocks.settle()
        self.states.step([entry[:2] for entry in plan], fails=True)
        for sequence, num_tokens, copies in plan:
            seen["copies of failed steps"] += len(copies)
            self.memory.write(sequence, num_tokens, junk=True)
        lost = [sequence for sequence, _, _ in plan]
        lost += [one for one in self.states.discard() if one not in lost]
        for sequence in lost:
            if sequence in self.loads:
                seen["loads of failed steps"] += 1
                sequence.num_computed = self.loads.pop(sequence)[0] * self.blocks.block_size
            self.drop(sequence)
            self.preempted.append(sequence)

    def run(self, plan: list[tuple[Sequence, int, tuple[BlockCopy, ...]]]) -> None:
        """Run a step and commit it."""
        self.execute(plan)
        for sequence, num_tokens, _ in plan:
            self.blocks.commit(sequence, num_tokens)

    def execute(self, plan: list[tuple[Sequence, int, tuple[BlockCopy, ...]]]) -> None:
        """Execute copies in any order, then rows, as in a step."""
        self.blocks.settle()
        copies = [copy for _, _, of_one in plan for copy in of_one]
        destinations = {copy.destination for copy in copies}
        assert len(destinations) == len(copies)
        assert not {copy.source for copy in copies} & destinations
        seen["copies"] += len(copies)
        self.shuffle.shuffle(copies)
        self.memory.copy(copies)
        self.states.step([entry[:2] for entry in plan])
        self.states.settle()
        for sequence, num_tokens, _ in plan:
            if sequence in self.loads:
                first, loads = self.loads.pop(sequence)
                for block, found in loads:
                    self.memory.put(block, found)
                self.blocks.confirm_loads(sequence, first)
            self.memory.write(sequence, num_tokens)

    def allocate(self, sequence: Sequence, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        before = self.blocks.num_free_blocks, list(sequence.block_table)
        copies = self.blocks.allocate(sequence, num_tokens)
        if copies is None:
            assert before == (self.blocks.num_free_blocks, list(sequence.block_table))
            # To a sequence that is alone, without shared blocks to copy, the manager must grant
            # whatever fits the pool.
            alone = len(self.holders) == 1 and not self.forked(sequence)
            fits = sequence.num_computed + num_tokens <= self.blocks.num_slots
            assert not (alone and fits)
            seen["no free block"] += 1
        return copies

    def forked(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that may have to be copied first."""
        return len(sequence.block_table) * self.blocks.block_size > sequence.num_computed

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, sequence.num_uncomputed)
        for start in range(0, num_tokens, self.rows):
            rows = min(self.rows, num_tokens - start)
            copies = self.allocate(sequence, rows)
            if copies is None:
                return
            self.run([(sequence, rows, copies)])

    def check_books(self) -> None:
        self.blocks.check_invariants(self.holders)
        self.steps += 1
        seen["steps"] += 1
        seen["shared blocks"] += self.blocks.pool.num_shared
        self.blocks.metadata.begin_step(self.steps)

    def check_tables(self) -> None:
        """Check that tables and hashes lead to what was computed."""
        self.states.check()
        for sequence in self.holders:
            for position in range(sequence.num_computed):
                memory, place = self.memory.place(sequence, position)
                assert memory[place] == truth(sequence, position)

    def check_cached(self) -> None:
        """Check that cached blocks are full and can be found."""
        size = self.blocks.block_size
        states = unpack(self.blocks.metadata.words).state
        for block in (states == BlockState.CACHED).nonzero()[0].tolist():
            filled = self.blocks.pool.filled[block]
            memory, place = self.memory.slots, block
            if self.sealed and filled < size:
                memory, place = self.memory.opened, self.blocks.pool.open[block]
            salt, tokens = memory[place, filled - 1]
            assert salt not in ("junk", "nothing")
            assert len(tokens) % size == filled % size
            for offset in range(filled):
                length = len(tokens) - filled + offset + 1
                assert memory[place, offset] == (salt, tokens[:length])
            found = self.blocks.index.find(make([*tokens, UNIQUE_TOKEN], salt))
            assert found.num_tokens == len(tokens), "its chain was cut before its end"
            assert found.blocks[-1] == block or filled < size
            seen["cached blocks that are not full"] += filled < size
