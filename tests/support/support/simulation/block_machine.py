"""The rules of random histories of the block manager; each ends with a check of all invariants."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.simulation.block_history import UNIQUE_TOKEN, BlockHistory, seen
from support.simulation.content_states import make

from appliance.engine.nouns.plan import ScheduledSequence
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.scheduler import settle_run

# Two tokens and short prompts, most of them with the same start, make equal prefixes the rule.
START = [0, 1, 1, 0, 1, 0, 0, 1]
TOKENS = st.builds(
    lambda shared, own: [*START[:shared], *own],
    st.sampled_from([0, 3, 6, 7, 8]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
SALTS = st.sampled_from(["", "a"])
PICK = st.integers(0, 5)


class BlockMachine(BlockHistory, RuleBasedStateMachine):
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
        self.begin(num_blocks, block_size, sealed, rows, shuffle, checkpoints)
        self.admit(make(tokens, salt))

    @precondition(BlockHistory.has_room)
    @rule(tokens=TOKENS, salt=SALTS, fails=st.booleans())
    def add(self, tokens: list[int], salt: str, fails: bool) -> None:
        self.admit(make(tokens, salt), fails)

    @precondition(BlockHistory.has_holder)
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
        """Write rows of drafts, and keep the first ones; the simulation tests states."""
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

    @precondition(BlockHistory.has_holder)
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

    @precondition(BlockHistory.has_holder)
    @rule(pick=PICK, token=st.integers(0, 1), width=st.integers(1, 3))
    def grow_beams(self, pick: int, token: int, width: int) -> None:
        """Replace others by forks of one, each with a token of its own, as beam search does."""
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
            count = min(rows, beam.num_uncomputed)  # sealed blocks compute the rest again
            copies = self.allocate(beam, count) if count else None
            if copies is not None:
                plan.append((beam, count, copies))
                rows -= count
        self.run(plan)

    @precondition(BlockHistory.has_holder)
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

    @precondition(BlockHistory.has_holder)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.drop(self.holder(pick))

    @precondition(BlockHistory.has_holder)
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
        self.check_books()

    @invariant()
    def tables_and_hashes_lead_to_what_was_computed(self) -> None:
        self.check_tables()

    @invariant()
    def cached_blocks_are_whole_and_can_be_found(self) -> None:
        self.check_cached()
