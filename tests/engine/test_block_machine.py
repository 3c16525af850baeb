"""Random histories of the block manager, with a model of the memory that its tables point into.

Each written slot remembers the salt and all tokens up to its own, which is what real keys and
values depend on. Whatever a block table promises is read back after every rule.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.engine.block_manager import BlockManager
from appliance.engine.block_metadata import unpack
from appliance.engine.request import Request, SamplingParams
from appliance.engine.sequence import Sequence
from appliance.events import BlockState

Content = tuple[str, tuple[int, ...]]

# Two tokens and short prompts, so that equal beginnings are the rule.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
SALTS = st.sampled_from(["", "a"])
PICK = st.integers(0, 5)
MAX_SEQUENCES = 6
UNIQUE_TOKEN = 99


def make(tokens: list[int], salt: str) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    return Sequence(request)


seen: Counter[str] = Counter()  # how often what matters came up


class BlockMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 30), block_size=st.integers(1, 4), tokens=TOKENS, salt=SALTS
    )
    def start(self, num_blocks: int, block_size: int, tokens: list[int], salt: str) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.memory: dict[tuple[int, int], Content] = {}
        self.holders: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.slots = list(range(1, MAX_SEQUENCES + 1))
        self.steps = 0
        self.admit(make(tokens, salt))

    def truth(self, sequence: Sequence, position: int) -> Content:
        return sequence.request.cache_salt, tuple(sequence.token_ids[: position + 1])

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.blocks.block_size)
        return sequence.block_table[index], offset

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

    def admit(self, sequence: Sequence) -> None:
        prefix = self.blocks.find_prefix(sequence)
        cost = self.blocks.cost_of_admission(sequence, prefix)
        new = self.blocks.blocks_for(len(sequence.token_ids)) - len(prefix)
        before = self.blocks.num_free_blocks
        self.hold(sequence)
        self.blocks.attach(sequence, prefix)
        assert before - self.blocks.num_free_blocks == cost - new
        assert sequence.num_computed < len(sequence.token_ids)
        seen["blocks hit"] += len(prefix)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        before = self.blocks.num_free_blocks, list(sequence.block_table)
        copies = self.blocks.allocate(sequence, num_tokens)
        if copies is None:
            assert before == (self.blocks.num_free_blocks, sequence.block_table)
            # Alone and without shared blocks to copy, whatever fits the pool must be granted.
            alone = len(self.holders) == 1 and not self.forked(sequence)
            fits = sequence.num_computed + num_tokens <= self.blocks.num_slots
            assert not (alone and fits)
            seen["no free block"] += 1
            return False
        sources = {copy.source for copy in copies}
        destinations = {copy.destination for copy in copies}
        assert len(destinations) == len(copies)
        assert not sources & destinations
        assert not destinations & set(before[1])
        seen["copies"] += len(copies)
        for copy in copies:
            for offset in range(self.blocks.block_size):
                content = self.memory.get((copy.source, offset))
                if content is not None:
                    self.memory[copy.destination, offset] = content
        return True

    def forked(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that may have to be copied first."""
        return len(sequence.block_table) * self.blocks.block_size > sequence.num_computed

    def write(self, sequence: Sequence, num_tokens: int, junk: bool = False) -> None:
        for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
            content = ("junk", (position,)) if junk else self.truth(sequence, position)
            self.memory[self.place(sequence, position)] = content

    @precondition(has_room)
    @rule(tokens=TOKENS, salt=SALTS)
    def add(self, tokens: list[int], salt: str) -> None:
        self.admit(make(tokens, salt))

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        num_tokens = min(num_tokens, sequence.num_uncomputed)
        if num_tokens and self.allocate(sequence, num_tokens):
            self.write(sequence, num_tokens)
            self.blocks.commit(sequence, num_tokens)

    @precondition(has_holder)
    @rule(pick=PICK, num_tokens=st.integers(1, 10))
    def compute_one(self, pick: int, num_tokens: int) -> None:
        self.compute(self.holder(pick), num_tokens)

    @rule(num_tokens=st.integers(1, 10), tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6))
    def step_all(self, num_tokens: int, tokens: list[int]) -> None:
        for sequence, token in zip(self.holders, tokens, strict=False):
            if sequence.num_uncomputed == 0:
                sequence.token_ids.append(token)
            self.compute(sequence, num_tokens)

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
    @rule(pick=PICK)
    def preempt(self, pick: int) -> None:
        sequence = self.holder(pick)
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
        num_tokens = min(num_tokens, sequence.num_uncomputed)
        if num_tokens and self.allocate(sequence, num_tokens):
            self.write(sequence, num_tokens, junk=True)
        self.drop(sequence)

    @rule(num_blocks=st.integers(1, 30))
    def evict(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.blocks.num_free_blocks)
        if num_blocks:
            before = self.blocks.num_free_blocks, self.blocks.num_cached
            sequence = make([UNIQUE_TOKEN] * num_blocks * self.blocks.block_size, "")
            assert self.allocate(sequence, len(sequence.token_ids))
            self.write(sequence, len(sequence.token_ids), junk=True)
            self.blocks.free(sequence)
            evicted = before[1] - self.blocks.num_cached
            assert evicted == max(0, num_blocks - (before[0] - before[1]))
            seen["evictions"] += evicted

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check_invariants(self.holders)
        self.steps += 1
        seen["steps"] += 1
        seen["shared blocks"] += self.blocks.num_shared
        self.blocks.metadata.begin_step(self.steps)

    @invariant()
    def tables_lead_to_what_was_computed(self) -> None:
        for sequence in self.holders:
            for position in range(sequence.num_computed):
                content = self.memory[self.place(sequence, position)]
                assert content == self.truth(sequence, position)

    @invariant()
    def cached_blocks_are_whole_and_can_be_found(self) -> None:
        size = self.blocks.block_size
        states = unpack(self.blocks.metadata.words).state
        for block in (states == BlockState.CACHED).nonzero()[0].tolist():
            salt, tokens = self.memory[block, size - 1]
            assert salt != "junk"
            assert len(tokens) % size == 0
            for offset in range(size):
                length = len(tokens) - size + offset + 1
                assert self.memory[block, offset] == (salt, tokens[:length])
            found = self.blocks.find_prefix(make([*tokens, UNIQUE_TOKEN], salt))
            assert len(found) == len(tokens) // size, "its chain was cut before its end"
            assert found[-1] == block


def test_random_histories_keep_the_books_and_the_content() -> None:
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["steps"] >= 2000
    assert min(seen.values()) >= 20, f"the histories hardly touch something: {seen}"
