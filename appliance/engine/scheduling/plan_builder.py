"""A plan in the making: running sequences get rows, preempting later ones if necessary.

Entries can be withdrawn. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from appliance.engine.nouns.moves import StateMoves
from appliance.engine.nouns.plan import Plan, ScheduledSequence
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.policy import (
    choose_victim,
    chunk_end,
    gets_checkpoint,
    is_answer,
    uncut,
)

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import BlockCopy
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.state import State
    from appliance.engine.tiers.host_memory import Arrival
    from appliance.engine.tiers.tiers import Tiers


Rows = list[tuple["Sequence", int]]  # each sequence with the rows it wants


@dataclass(slots=True)
class PlanBuilder:
    """Collects entries within a budget of rows."""

    budget: int  # rows left
    now: float = 0.0  # monotonic seconds
    entries: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    copies: dict[Sequence, tuple[BlockCopy, ...]] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)  # for the first time
    preempted: list[Sequence] = field(default_factory=list)
    arrivals: dict[Sequence, list[Arrival]] = field(default_factory=dict)

    # For admission: blocks that running sequences still need, blocks owed to sequences that start
    # in this step, and sequences without room.
    num_promised: int | None = None
    num_owed: int = 0
    blocked: list[Sequence] = field(default_factory=list)

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        copies: tuple[BlockCopy, ...],
        before: ScheduledSequence | None = None,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Schedule the next `num_tokens` rows of a sequence, after those in flight, plus drafts."""
        start = sequence.num_computed if before is None else before.end
        known, end = len(sequence.token_ids), start + num_tokens
        samples = end == (known if before is None else known + before.samples)
        follows = end > known
        assert not follows or (samples and num_tokens == 1)
        entry = ScheduledSequence(sequence, start, num_tokens, samples, follows)
        if sequence.to_read:
            entry = entry._replace(read=sequence.rows_to_read(start, end))
        if drafts:
            entry = entry._replace(num_tokens=num_tokens + len(drafts), drafts=drafts)
        self.entries[sequence] = entry
        self.budget -= entry.num_tokens
        if copies:
            self.copies[sequence] = copies

    def take_back(self, sequence: Sequence) -> None:
        """Undo `add` for a sequence, if called, and its start if this was the first."""
        if sequence in self.started:
            self.started.remove(sequence)
            sequence.first_scheduled = None
        entry = self.entries.pop(sequence, None)
        if entry is not None:
            self.budget += entry.num_tokens
        self.copies.pop(sequence, None)
        self.arrivals.pop(sequence, None)

    def num_rows(self, sequence: Sequence) -> int:
        entry = self.entries.get(sequence)
        return 0 if entry is None else entry.num_tokens

    def finished(self, blocks: BlockManager, tiers: Tiers) -> Plan:
        entries = list(self.entries.values())
        scheduled = tuple([entry for entry in entries if entry.num_tokens == 1])
        if len(scheduled) < len(entries):
            scheduled += tuple([entry for entry in entries if entry.num_tokens > 1])
        states = blocks.states
        if states is not None:  # before the tiers: blocks that checkpoints evict may go there
            size = blocks.block_size
            wanted = [entry for entry in scheduled if gets_checkpoint(entry, size)]
            copies, checkpoints = states.plan(wanted)
        arrivals = list(chain.from_iterable(self.arrivals.values())) if self.arrivals else ()
        moves = tiers.take_moves(arrivals)
        return Plan(
            scheduled=scheduled,
            copies=tuple(copy for copies in self.copies.values() for copy in copies),
            started=tuple([one.request.request_id for one in self.started if one.index == 0]),
            preempted=tuple(self.preempted),
            open_blocks=blocks.open_blocks(scheduled),
            saves=moves.saves,
            loads=moves.loads,
            states=None
            if states is None
            else StateMoves(
                saves=moves.state_saves,
                loads=moves.state_loads,
                copies=copies,
                checkpoints=checkpoints,
                ended=states.take_ended(copies),
            ),
        )


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


def fitted_rows(state: State, sequence: Sequence, first: int, num_rows: int) -> int:
    """Return the number of next rows that cut no picture where none may be; see `policy.uncut`.

    Args:
        first: rows that it gets in this step already.
        num_rows: wanted behind them; none if it is not positive.
    """
    if not state.bounds.limits.spare_rows:
        return num_rows
    if num_rows <= 0:  # a picture took more rows than were left
        return 0
    own = state.in_flight.entries.get(sequence)
    start = (own[0].end if own else sequence.num_computed) + first
    return uncut(sequence, start, start + num_rows) - start


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
    num_tokens = fitted_rows(state, sequence, 0, min(num_left, builder.budget))
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
        _preempt(state, builder, victim)
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


def _preempt(state: State, builder: PlanBuilder, victim: Sequence) -> None:
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
