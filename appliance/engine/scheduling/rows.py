"""Gives running sequences their rows, preempting later sequences if necessary.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.scheduling.policy import choose_victim
from appliance.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from appliance.engine.scheduling.draft import Draft
    from appliance.engine.scheduling.state import State
    from appliance.engine.sequence import Sequence


def wanted_rows(state: State) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
    """Return running sequences that want one row, and those that want more, in rank order."""
    decodes, prompts = [], []
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
            decodes.append(sequence)
        elif num_left:  # else it waits for what is in flight, or as a beam for its siblings
            prompts.append((sequence, num_left))
    return decodes, prompts


def extend(state: State, draft: Draft, sequence: Sequence, num_left: int) -> None:
    """Give a running sequence its next rows, as many as fit, preempting later ones if necessary.

    Without a victim it keeps its blocks and waits for the next step.
    """
    num_tokens = min(num_left, draft.budget)
    if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
        return
    own = state.in_flight.entries.get(sequence)
    before = own[0] if own else None
    num_before = 0 if before is None else before.num_tokens
    while (copies := state.blocks.allocate(sequence, num_before + num_tokens)) is None:
        victim = choose_victim(state.running, sequence, state.in_flight.entries)
        if victim is None:
            state.in_flight.starve(sequence)
            return
        preempt(state, draft, victim)
    draft.add(sequence, num_tokens, copies, before)


def preempt(state: State, draft: Draft, victim: Sequence) -> None:
    """Take the blocks of a victim's unit, and its rows in this step."""
    members = victim.group.unit(victim)
    for member in members:
        state.tiers.discard(member)
    if len(members) == 1:
        state.tiers.keep(victim)
    state.requeue(victim)
    for member in members:
        draft.take_back(member)
        draft.preempted.append(member)
        member.num_preemptions += 1
        state.counters.preemptions += 1
