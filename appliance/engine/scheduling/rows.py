"""Gives running sequences their rows, preempting later sequences if necessary. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.policy import choose_victim, chunk_end, is_answer

if TYPE_CHECKING:
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.plan_builder import PlanBuilder
    from appliance.engine.scheduling.state import State


Rows = list[tuple["Sequence", int]]  # each sequence with the rows it wants


def wanted_rows(state: State) -> tuple[Rows, Rows]:
    """Return running answers, and sequences that still read a prompt, in rank order.

    Each has the number of rows that one step may run.
    """
    decodes: Rows = []
    prompts: Rows = []
    in_flight = state.in_flight
    entries = in_flight.entries
    for sequence in state.running:
        if sequence in entries:
            num_left = in_flight.num_left(sequence)
        elif sequence.is_held:
            continue
        else:
            num_left = len(sequence.token_ids) - sequence.num_computed
        if num_left == 1:
            decodes.append((sequence, 1))
        elif num_left:  # otherwise it waits for a plan in flight, or as a beam for its siblings
            start = entries[sequence][0].end if sequence in entries else sequence.num_computed
            rows = decodes if is_answer(sequence, num_left) else prompts
            rows.append((sequence, rows_of_step(state, sequence, start, num_left)))
    return decodes, prompts


def rows_of_step(state: State, sequence: Sequence, start: int, num_left: int) -> int:
    """Return the number of rows for one step: up to the next state checkpoint."""
    states = state.blocks.states
    if states is None or not states.checkpoints.num_rows:
        return num_left
    return chunk_end(sequence, start, start + num_left, state.blocks.block_size) - start


def extend(
    state: State,
    builder: PlanBuilder,
    sequence: Sequence,
    num_left: int,
    drafts: tuple[int, ...] = (),
) -> None:
    """Give a running sequence as many of its next rows as fit, preempting later ones if necessary.

    Without a victim it keeps its blocks and waits for the next step. Drafts preempt nobody: without
    free blocks for them, the sequence runs without.
    """
    num_tokens = min(num_left, builder.budget)
    if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
        return
    if drafts and _extend_by_drafts(state, builder, sequence, num_tokens, drafts):
        return
    own = state.in_flight.entries.get(sequence)
    before = own[0] if own else None
    num_before = 0 if before is None else before.num_tokens
    while (copies := state.blocks.allocate(sequence, num_before + num_tokens)) is None:
        victim = choose_victim(state.running, sequence, state.in_flight.entries)
        if victim is None:
            state.in_flight.starve(sequence)
            return
        preempt(state, builder, victim)
    builder.add(sequence, num_tokens, copies, before)


def _extend_by_drafts(
    state: State, builder: PlanBuilder, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...]
) -> bool:
    assert sequence not in state.in_flight.entries, "its next token is not known"
    states = state.blocks.states
    if num_tokens + len(drafts) > builder.budget:
        return False
    if states is not None and not states.remember(sequence):
        return False
    copies = state.blocks.allocate(sequence, num_tokens + len(drafts))
    if copies is None:
        if states is not None:
            states.forget(sequence)
        return False
    builder.add(sequence, num_tokens, copies, drafts=drafts)
    return True


def preempt(state: State, builder: PlanBuilder, victim: Sequence) -> None:
    """Take the blocks of a victim's unit, and its rows in this step."""
    members = victim.group.unit(victim)
    for member in members:
        state.tiers.discard(member)
    if len(members) == 1:
        state.tiers.keep(victim)
    state.requeue(victim)
    for member in members:
        builder.take_back(member)
        builder.preempted.append(member)
        member.num_preemptions += 1
        state.counters.preemptions += 1
