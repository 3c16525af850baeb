"""Random histories of the block manager, with a model of the memory that its tables point into.

Whatever a block table promises is read back after every rule. What is evicted
goes outside, by its hash, and comes back when a sequence that begins alike is admitted.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile

import hypothesis.strategies as st
from content_memory import Content, ContentMemory, truth
from content_states import ContentStates, make
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import unpack
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.moves import BlockCopy
from appliance.engine.plan import ScheduledSequence
from appliance.engine.scheduling.verification import settle_run
from appliance.engine.sequence import Sequence
from appliance.events import BlockState

# Two tokens and short prompts, most of them with the same start: equal beginnings are the rule.
START = [0, 1, 1, 0, 1, 0, 0, 1]
TOKENS = st.builds(
    lambda shared, own: [*START[:shared], *own],
    st.sampled_from([0, 3, 6, 7, 8]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
SALTS = st.sampled_from(["", "a"])
PICK = st.integers(0, 5)
MAX_SEQUENCES = 4
UNIQUE_TOKEN = 99


seen: Counter[str] = Counter()  # how often what matters came up


class BlockMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.one_of(st.integers(4, 10), st.integers(4, 40)),
        block_size=st.sampled_from([1, 2, 3, 4, 4, 5]),
        tokens=TOKENS,
        salt=SALTS,
        sealed=st.booleans(),
        rows=st.integers(4, 12),
        shuffle=st.randoms(use_true_random=False),
        checkpoints=st.sampled_from([None, None, 0, 2, 8, 40]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        tokens: list[int],
        salt: str,
        sealed: bool,
        rows: int,
        shuffle: random.Random,
        checkpoints: int | None = None,
    ) -> None:
        num_open = num_open_pages(MAX_SEQUENCES, rows, block_size) if sealed else 0
        states = None if checkpoints is None else StateSlots(MAX_SEQUENCES, checkpoints)
        self.blocks = BlockManager(num_blocks, block_size, num_open=num_open, states=states)
        self.sealed, self.rows, self.shuffle = sealed, rows, shuffle
        self.memory = ContentMemory(self.blocks, sealed)
        self.states = ContentStates(self.blocks, shuffle, seen)
        self.holders: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.outside: dict[bytes, list[Content]] = {}
        # Of preempted ones the block that is not full, and tokens in all.
        self.last: dict[Sequence, tuple[int, list[Content]]] = {}
        # Of sequences that begin with some, until the step has run: index of the first, and what.
        self.loads: dict[Sequence, tuple[int, list[tuple[int, list[Content]]]]] = {}
        self.blocks.pool.on_evict = self.evicted
        self.slots = list(range(1, MAX_SEQUENCES + 1))
        self.steps = 0
        self.admit(make(tokens, salt))

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
        """Continue a block table with what lies outside; the books know, but nobody finds it."""
        size = self.blocks.block_size
        first, num_last = divmod(sequence.num_computed, size)
        if num_last or self.blocks.states is not None:  # the simulation brings states back
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
        """Attach what is found and compute at least a token, as admission does."""
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
        seen["tokens hit of an open page"] += partial if self.sealed else 0
        if not fits:
            self.last.pop(sequence, None)
            return
        self.load(sequence)
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
        """Nothing is known of what a step wrote or copied."""
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
        """Copies in any order, then rows, as in a step."""
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
            # Alone and without shared blocks to copy, whatever fits the pool must be granted.
            alone = len(self.holders) == 1 and not self.forked(sequence)
            fits = sequence.num_computed + num_tokens <= self.blocks.num_slots
            assert not (alone and fits)
            seen["no free block"] += 1
        return copies

    def forked(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that may have to be copied first."""
        return len(sequence.block_table) * self.blocks.block_size > sequence.num_computed

    @precondition(has_room)
    @rule(tokens=TOKENS, salt=SALTS, fails=st.booleans())
    def add(self, tokens: list[int], salt: str, fails: bool) -> None:
        self.admit(make(tokens, salt), fails)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, sequence.num_uncomputed)
        for start in range(0, num_tokens, self.rows):
            rows = min(self.rows, num_tokens - start)
            copies = self.allocate(sequence, rows)
            if copies is None:
                return
            self.run([(sequence, rows, copies)])

    @precondition(has_holder)
    @rule(pick=PICK, num_tokens=st.integers(1, 10))
    def compute_one(self, pick: int, num_tokens: int) -> None:
        self.compute(self.holder(pick), num_tokens)

    @rule(
        num_tokens=st.integers(1, 10),
        tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6),
        fails=st.booleans(),
    )
    def step_all(self, num_tokens: int, tokens: list[int], fails: bool) -> None:
        plan = []
        rows = self.rows
        for sequence, token in zip(self.holders, tokens, strict=False):
            if sequence.num_uncomputed == 0:
                sequence.token_ids.append(token)
            count = min(num_tokens, sequence.num_uncomputed, rows)
            copies = self.allocate(sequence, count) if count else None
            if copies is not None:
                plan.append((sequence, count, copies))
                rows -= count
        if fails:
            self.fail(plan)
        else:
            self.run(plan)

    @precondition(lambda self: self.has_holder() and self.blocks.states is None)
    @rule(
        pick=PICK,
        drafts=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        right=st.integers(0, 9),
        token=st.integers(0, 1),
    )
    def verify(self, pick: int, drafts: list[int], right: int, token: int) -> None:
        """Write rows of drafts, and keep the first ones; states are the simulation's."""
        sequence = self.holder(pick)
        self.compute(sequence, sequence.num_uncomputed - 1)
        if sequence.num_uncomputed == 0:
            sequence.token_ids.append(token)
        drafts = drafts[: self.rows - 1]
        copies = None
        if sequence.num_uncomputed == 1:
            copies = self.allocate(sequence, 1 + len(drafts))
        if copies is None:
            return
        right = min(right, len(drafts))
        kept = [*sequence.token_ids, *drafts[:right], token]
        rows = 1 + len(drafts)
        entry = ScheduledSequence(
            sequence, sequence.num_computed, rows, samples=True, drafts=tuple(drafts)
        )
        sequence.token_ids += drafts
        self.execute([(sequence, rows, copies)])
        sequence.token_ids[:] = kept
        settle_run(self.blocks, entry, right)
        least = self.blocks.blocks_for(sequence.num_computed)
        assert len(sequence.block_table) == least, "blocks behind its tokens"
        seen["rejected drafts"] += len(drafts) - right

    @precondition(has_holder)
    @rule(pick=PICK, tokens=TOKENS)
    def append(self, pick: int, tokens: list[int]) -> None:
        self.holder(pick).token_ids.extend(tokens)

    @precondition(lambda self: self.has_holder() and self.has_room())
    @rule(
        pick=PICK,
        back=st.integers(0, 4),
        tail=TOKENS,
        parent_ends=st.booleans(),
        num_tokens=st.integers(0, 3),
    )
    def fork(
        self, pick: int, back: int, tail: list[int], parent_ends: bool, num_tokens: int
    ) -> None:
        parent = self.holder(pick)
        self.compute(parent, len(parent.token_ids))
        length = max(0, parent.num_computed - back)
        child = make([*parent.token_ids[:length], *tail], parent.request.cache_salt)
        before = self.blocks.num_free_blocks
        self.hold(child)
        self.blocks.fork(parent, child, length)
        assert self.blocks.num_free_blocks == before
        if parent_ends:
            self.drop(parent)
        self.compute(child, num_tokens)

    @precondition(has_holder)
    @rule(pick=PICK, token=st.integers(0, 1), width=st.integers(1, 3))
    def grow_beams(self, pick: int, token: int, width: int) -> None:
        """Others give up what they have and go on where one is, each with a token of its own."""
        parent = self.holder(pick)
        self.compute(parent, len(parent.token_ids))
        if parent.num_uncomputed:
            return
        salt = parent.request.cache_salt
        beams: list[Sequence] = []
        for other in self.holders:
            if other is not parent and other.request.cache_salt == salt and len(beams) < width:
                self.blocks.free(other)
                beams.append(other)
        for other in beams:
            other.token_ids = [*parent.token_ids, 1 - token]
            self.blocks.fork(parent, other, parent.num_computed)
        parent.token_ids.append(token)
        seen["beams"] += len(beams)
        plan, rows = [], self.rows
        for beam in (*beams, parent):
            count = min(rows, beam.num_uncomputed)  # of sealed blocks the rest, once more
            copies = self.allocate(beam, count) if count else None
            if copies is not None:
                plan.append((beam, count, copies))
                rows -= count
        self.run(plan)

    @precondition(has_holder)
    @rule(pick=PICK, keeps=st.booleans())
    def preempt(self, pick: int, keeps: bool) -> None:
        sequence, size = self.holder(pick), self.blocks.block_size
        held = self.blocks.num_held(sequence)
        if keeps and held:
            self.blocks.index.extend_hashes(sequence, held // size)
            sequence.num_kept = held
            places = [self.memory.place(sequence, at) for at in range(held - held % size, held)]
            self.last[sequence] = held, [memory[place] for memory, place in places]
        self.drop(sequence)
        self.preempted.append(sequence)

    @precondition(lambda self: self.preempted)
    @rule()
    def readmit(self) -> None:
        self.admit(self.preempted.pop())

    @precondition(has_holder)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.drop(self.holder(pick))

    @precondition(has_holder)
    @rule(pick=PICK, num_tokens=st.integers(1, 6))
    def abort_within_a_step(self, pick: int, num_tokens: int) -> None:
        sequence = self.holder(pick)
        num_tokens = min(num_tokens, sequence.num_uncomputed, self.rows)
        if num_tokens and self.allocate(sequence, num_tokens) is not None:
            self.blocks.settle()
            self.memory.write(sequence, num_tokens, junk=True)
        self.drop(sequence)

    @rule(num_blocks=st.integers(1, 30))
    def evict(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.blocks.num_free_blocks)
        if self.sealed:
            num_blocks = min(num_blocks, self.rows // self.blocks.block_size)
        if num_blocks:
            before = self.blocks.num_free_blocks, self.blocks.num_cached
            sequence = make([UNIQUE_TOKEN] * num_blocks * self.blocks.block_size, "")
            assert self.allocate(sequence, len(sequence.token_ids)) == ()
            self.memory.write(sequence, len(sequence.token_ids), junk=True)
            self.blocks.free(sequence)
            evicted = before[1] - self.blocks.num_cached
            needed = max(0, num_blocks - (before[0] - before[1]))
            assert evicted == needed or (self.sealed and evicted > needed)
            seen["evictions"] += evicted

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check_invariants(self.holders)
        self.steps += 1
        seen["steps"] += 1
        seen["shared blocks"] += self.blocks.pool.num_shared
        self.blocks.metadata.begin_step(self.steps)

    @invariant()
    def tables_and_hashes_lead_to_what_was_computed(self) -> None:
        self.states.check()
        for sequence in self.holders:
            for position in range(sequence.num_computed):
                memory, place = self.memory.place(sequence, position)
                assert memory[place] == truth(sequence, position)

    @invariant()
    def cached_blocks_are_whole_and_can_be_found(self) -> None:
        size = self.blocks.block_size
        states = unpack(self.blocks.metadata.words).state
        for block in (states == BlockState.CACHED).nonzero()[0].tolist():
            filled = self.blocks.pool.filled[block]
            memory, place = self.memory.slots, block
            if self.sealed and filled < size:
                memory, place = self.memory.pages, self.blocks.pool.open[block]
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
