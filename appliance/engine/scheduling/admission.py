"""Starts waiting sequences: gives them a slot and the blocks they can share. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.policy import may_admit, may_overtake, may_pass

if TYPE_CHECKING:
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.plan_builder import PlanBuilder
    from appliance.engine.scheduling.state import State
    from appliance.engine.scheduling.waiting import Lane


def start_next(
    state: State, builder: PlanBuilder, lane: Lane, *, beside: int | None = None
) -> Sequence | None:
    """Start one sequence of a lane; return None if there is no room for it.

    Gives it no rows in `builder` yet.

    Args:
        beside: tokens that the owner's first running prompt has left; starts only one that may
            pass it.
    """
    if builder.preempted or not (state.slots and lane.sequences):
        return None  # blocks of preempted sequences are not for newcomers
    if beside is None:
        sequence = lane.next(lambda one: _num_cached(state, one))
    else:
        sequence = lane.briefest(lambda one: _num_left(state, one))
        if not may_pass(_num_left(state, sequence), beside):
            return None
    if not may_overtake(sequence, builder.blocked):
        return None
    if builder.num_promised is None:
        growing = [one for one in state.running if not one.is_held]
        builder.num_promised = sum(map(state.blocks.num_missing, growing)) + len(state.running)
    unit = sequence.group.unit(sequence)
    num_promised = builder.num_promised + sequence.group.num_beside(sequence)
    if len(unit) > len(state.slots) or not _start_table(state, builder, sequence, num_promised):
        builder.blocked.append(sequence)
        return None
    for other in builder.blocked:
        other.num_overtaken += 1
    if beside is None:  # one that passes takes no earlier one's turn
        lane.overtake(sequence)
    for member in unit:
        if member is not sequence:
            member.slot = state.slots.pop()
        if state.run(member, builder.now):
            builder.started.append(member)
    sequence.group.start()
    builder.num_promised += len(unit)
    return sequence


def _num_cached(state: State, sequence: Sequence) -> int:
    if _can_fork(state, sequence):
        return sequence.num_prompt_tokens
    num_tokens = state.blocks.find_prefix(sequence).num_tokens
    return max(num_tokens, state.tiers.num_held(sequence))


def _num_left(state: State, sequence: Sequence) -> int:
    return len(sequence.token_ids) - _num_cached(state, sequence)


def _can_fork(state: State, sequence: Sequence) -> bool:
    parent = sequence.parent
    return (
        parent is not None
        and state.blocks.states is None  # it is already past its prompt's end
        and sequence.first_scheduled is None
        and parent.status is SequenceStatus.RUNNING
        and parent.num_computed >= sequence.num_prompt_tokens
        and not state.tiers.is_loading(parent)  # its own copy of them has not arrived
    )


def _start_table(state: State, builder: PlanBuilder, sequence: Sequence, num_promised: int) -> bool:
    """Share the parent's prompt or a cached prefix, if everything else fits too.

    The step loads content from the tiers below.
    """
    blocks = state.blocks
    num_free = blocks.num_free_blocks - builder.num_owed
    if _can_fork(state, sequence):
        # Logits need the last prompt token to run again in a block of its own, copied or new.
        if not may_admit(1, num_free, num_promised):
            return False
        _fork_prompt(state, sequence)
        builder.num_owed += 1
        return True
    prefix = state.tiers.choose(sequence, blocks.find_prefix(sequence))
    cost = blocks.cost_of_admission(sequence, prefix)
    if not may_admit(cost, num_free, num_promised):
        # A copy takes a block more than a miss.
        prefix = blocks.without_copy(prefix)
        cost = blocks.cost_of_admission(sequence, prefix)
        if not may_admit(cost, num_free, num_promised):
            return False
    sequence.slot = state.slots.pop()
    num_free = blocks.num_free_blocks
    blocks.attach(sequence, prefix)
    builder.arrivals[sequence] = state.tiers.bring_back(sequence)
    builder.num_owed += cost - (num_free - blocks.num_free_blocks)
    if sequence.first_scheduled is None:
        sequence.num_cached = sequence.num_computed
        state.counters.prefix_queries += sequence.num_prompt_tokens
        state.counters.prefix_hits += sequence.num_cached
    return True


def _fork_prompt(state: State, sequence: Sequence) -> None:
    parent = sequence.parent
    assert parent is not None
    sequence.slot = state.slots.pop()
    state.blocks.fork(parent, sequence, sequence.num_prompt_tokens - 1)
    sequence.num_cached = parent.num_cached
