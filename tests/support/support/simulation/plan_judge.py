"""Checks what must be true of every plan, whatever the requests, when it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import StateMoves
    from appliance.engine.nouns.plan import Plan, ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence


def num_results(plan: Plan) -> int:
    """Count the results that `commit` gets for a plan."""
    return sum(entry.num_results for entry in plan.scheduled)


def look_at(plan: Plan, in_flight: Sequences[Plan], blocks: BlockManager, *, depth: int) -> None:
    """Assert that a plan can run after others and harms no sequence.

    Args:
        plan: the latest.
        in_flight: those before it that are not committed, oldest first.
        blocks: the cache's block manager.
        depth: plans of the same sequence that may be in flight before this one.
    """
    sequences = [entry.sequence for entry in plan.scheduled]
    assert len(set(sequences)) == len(sequences), "a sequence is twice in a step"
    singles = [entry.num_tokens == 1 for entry in plan.scheduled]
    assert singles == sorted(singles, reverse=True), "single rows come first"
    assert all(one.status is SequenceStatus.WAITING for one in plan.preempted)
    before: dict[Sequence, list[ScheduledSequence]] = {}
    for other in in_flight:
        for entry in other.scheduled:
            before.setdefault(entry.sequence, []).append(entry)
    for entry in plan.scheduled:
        assert len(before.get(entry.sequence, ())) <= depth, "it looks too far ahead"
        _look_at_rows(entry, before.get(entry.sequence, []))
    _look_at_writes(plan, blocks)
    _look_at_moves(plan, blocks.block_size)
    if plan.states is not None:
        _look_at_states(plan.states, plan, in_flight, blocks)


def _look_at_rows(entry: ScheduledSequence, before: list[ScheduledSequence]) -> None:
    """Check that rows continue a sequence's earlier ones, and that only its last one samples."""
    sequence = entry.sequence
    assert sequence.status is SequenceStatus.RUNNING, "somebody who does not run is scheduled"
    assert not sequence.is_held, "a beam runs that has nothing forked yet"
    computed = sequence.num_computed + sum(other.num_tokens for other in before)
    coming = sum(other.samples for other in before)
    assert entry.start == computed, "rows are left out, or run twice"
    end = entry.start + entry.num_own
    assert entry.samples == (end == len(sequence.token_ids) + coming)
    assert entry.follows == (end > len(sequence.token_ids))
    assert not entry.follows or entry.num_tokens == 1
    assert not entry.drafts or entry.samples, "drafts behind tokens that are still to be read"
    assert not entry.drafts or not before, "drafts behind a token that nobody knows"


def _look_at_writes(plan: Plan, blocks: BlockManager) -> None:
    """Check that each block has only one writer."""
    size, references = blocks.block_size, blocks.pool.references
    for entry in plan.scheduled:
        table = entry.sequence.block_table[: -(-entry.end // size)]
        assert all(references[block] > 0 for block in table), "a free block is referred to"
        written = table[entry.start // size :]
        assert all(references[block] == 1 for block in written), "a shared block is written"


def _look_at_states(
    states: StateMoves, plan: Plan, in_flight: Sequences[Plan], blocks: BlockManager
) -> None:
    """Check that each state has one writer, and no checkpoint is written while it is read."""
    slots = {entry.sequence.slot - 1 for entry in plan.scheduled}
    assert len(slots) == len(plan.scheduled), "two sequences write to one state"
    assert min(slots) >= 0, "a sequence runs without a state"
    written = [copy.destination for copy in states.copies]
    assert len(set(written)) == len(written), "a state is filled twice"
    sources = {copy.source for copy in states.copies}
    assert not sources & set(written), "a state is overwritten before it is copied"
    saved = [copy.destination for copy in states.checkpoints]
    assert len(set(saved)) == len(saved), "two checkpoints have one row"
    assert not (sources | slots | set(written)) & set(saved), "a checkpoint is shared while written"
    assert {copy.source for copy in states.checkpoints} <= slots, "nobody wrote that state"
    for other in in_flight:
        if other.states is not None:
            coming = {copy.destination for copy in other.states.checkpoints}
            assert not coming & (sources | set(saved)), "a checkpoint is used before it is known"
    for entry in plan.scheduled:
        last = entry.start + entry.num_own
        passed = any(end % blocks.block_size == 0 for end in range(last, entry.end + 1))
        assert not (entry.drafts and passed), "a checkpoint is passed"
        assert entry.start or entry.sequence.slot - 1 not in written, "a state for a beginning"


def _look_at_moves(plan: Plan, size: int) -> None:
    """Check that a plan copies and loads only for its sequences, right before their first rows.

    Thus it contains nothing for a sequence that was preempted while the plan was made.
    """
    if not (plan.copies or plan.loads):
        return
    written = [load.block for load in plan.loads]
    written += [copy.destination for copy in plan.copies]
    assert len(set(written)) == len(written), "a block is filled twice"
    assert not {copy.source for copy in plan.copies} & set(written), "the order of copies matters"
    # Blocks that contain first rows and earlier tokens, and the blocks before those.
    begun, before = set[int](), set[int]()
    for entry in plan.scheduled:
        table, full = entry.sequence.block_table, entry.start // size
        before.update(table[:full])
        if entry.start % size:
            begun.add(table[full])
    for copy in plan.copies:
        assert copy.destination in begun, "a copy is made for nobody"
    for load in plan.loads:
        assert load.block in begun or load.block in before, "a block is loaded for nobody"
