"""Shares a step's rows among prompts, in turns by priority and owner, and starts waiting ones.

`policy` decides whose turn it is, its size, and who may start. A sequence that starts gets a slot
and the blocks that it can share. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.plan_builder import extend, fitted_rows, rows_of_step
from appliance.engine.scheduling.policy import (
    MAX_STALLS,
    TURNS,
    may_admit,
    may_overtake,
    may_pass,
    may_stall,
    rank,
    turn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.plan_builder import PlanBuilder
    from appliance.engine.scheduling.state import State
    from appliance.engine.scheduling.waiting import Account, Accounts, Lane


def plan_prompts(state: State, builder: PlanBuilder, prompts: list[tuple[Sequence, int]]) -> None:
    """Give rows to running prompts and to those that may start.

    Args:
        builder: the step, with all answers' rows.
        prompts: running sequences in rank order, each with the rows it wants.
    """
    lanes = state.waiting.lanes() if state.slots else ()
    if not (prompts or lanes):
        return
    rows = _rows(state, builder, prompts)
    given = _share_rows(
        rows,
        _demands_of(prompts, lanes, state.accounts),
        lambda lane, beside: _start(state, builder, lane, beside),
        partial(fitted_rows, state),
    )
    wanted = dict(prompts)
    for sequence, num_tokens in given.items():
        if sequence not in wanted:
            copies = state.blocks.allocate(sequence, num_tokens)
            assert copies is not None, "started without the blocks for it"
            builder.add(sequence, num_tokens, copies)
    for sequence in wanted:
        if sequence in given:
            extend(state, builder, sequence, given[sequence])
    # If one lacked blocks, those that have some must go on, or none would ever be freed.
    rows -= sum(given[sequence] for sequence in given if sequence in builder.entries)
    for sequence, num_left in prompts:
        if rows > 0 and sequence not in builder.entries:
            extend(state, builder, sequence, min(rows, num_left))
            rows -= builder.num_rows(sequence)
    state.accounts.refund(given, builder.entries)


def _rows(state: State, builder: PlanBuilder, prompts: list[tuple[Sequence, int]]) -> int:
    if not builder.entries:
        return builder.budget
    context = sum([entry.start for entry in builder.entries.values()])
    start = max([sequence.num_computed for sequence, _ in prompts], default=0)
    rows = state.budget.prompt_rows(len(builder.entries), context, start)
    if rows >= builder.budget:
        return builder.budget
    if not state.stalls.count(state.counters.steps):
        return rows
    # Counts all rows of running prompts: the rest of a long prompt is not a short one.
    wanted = sum([len(one.token_ids) - one.num_cached for one, _ in prompts])
    for sequence in islice(state.waiting.queued(), len(state.slots)):
        if wanted > MAX_STALLS * builder.budget:
            break
        wanted += sequence.num_uncomputed
    if wanted > rows and may_stall(wanted, builder.budget):
        state.stalls.spend()
        return builder.budget
    return rows


def _demands_of(
    prompts: Iterable[tuple[Sequence, int]],
    lanes: Iterable[tuple[tuple[int, str], Lane]],
    accounts: Accounts,
) -> list[Demand]:
    """Group the demand for prompt rows by priority and owner."""
    demands: dict[tuple[int, str], Demand] = {}
    for sequence, wanted in prompts:
        key = (sequence.request.priority, sequence.request.owner)
        if key not in demands:
            demands[key] = Demand(key[0], accounts.of(sequence))
        demands[key].prompts.append((sequence, wanted))
    for demand in demands.values():
        demand.prompts.reverse()
    for key, lane in lanes:
        if key not in demands:
            demands[key] = Demand(key[0], lane.account)
        demands[key].lane = lane
    return list(demands.values())


# Starts a waiting sequence of a lane, and returns it with the rows that it wants.
Start = Callable[["Lane", int | None], tuple["Sequence", int] | None]


# Moves the end of a sequence's next rows out of a picture, given the rows it has in this step.
Fitted = Callable[["Sequence", int, int], int]


def _share_rows(
    rows: int, demands: list[Demand], start: Start, fitted: Fitted
) -> dict[Sequence, int]:
    """Divide rows among prompts, and charge their owners.

    Args:
        demands: consumed.
        start: starts a waiting sequence of a lane and returns it with the rows it wants, or None;
            given the tokens that an owner's first prompt has left, only one that may pass that.
        fitted: may return more rows than are asked for.

    Returns:
        Rows of each sequence, at least 1; together more than `rows` only for a whole picture.
    """
    given: dict[Sequence, int] = {}
    portion = max(1, rows // TURNS)
    while rows > 0 and demands:
        demand = demands[0] if len(demands) == 1 else min(demands, key=Demand.key)
        prompt = demand.take(start)
        if prompt is None:
            demands.remove(demand)
            continue
        sequence, wanted = prompt
        taken = min(wanted, rows if len(demands) == 1 and demand.is_alone else min(portion, rows))
        before = given.get(sequence, 0)
        taken = fitted(sequence, before, taken)
        if taken > rows and before:
            continue  # a picture that the next step has room for
        given[sequence] = before + taken
        demand.account.served += taken
        rows -= taken
        if taken < wanted:
            demand.put_back(sequence, wanted - taken)
    return given


@dataclass(slots=True, eq=False)
class Demand:
    """An owner's demand at one priority: rows of running prompts, and sequences to start.

    Attributes:
        prompts: running sequences, each with the rows it wants in this step; the first one last.
        lane: sequences that wait; None once none of them may start.
    """

    priority: int
    account: Account
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)
    lane: Lane | None = None
    _num_turns: int = 0
    _nobody_passes: bool = False

    def key(self) -> tuple[int, int, int]:
        """Rank for the next turn, lowest first."""
        return turn(self.priority, self.account.served, self.account.num_running)

    def take(self, start: Start) -> tuple[Sequence, int] | None:
        """Take the prompt whose turn it is, with the rows it wants; None if there is none."""
        self._num_turns += 1
        if not self.prompts:
            # One that has started needs rows: it may share a block that its parent writes next.
            return None if self.lane is None else start(self.lane, None)
        if self._num_turns % 2 == 0 and not self._nobody_passes:
            passing = self._passing(start)
            if passing is not None:
                return passing
            self._nobody_passes = True
        return self.prompts.pop()

    def put_back(self, sequence: Sequence, wanted: int) -> None:
        """Return a prompt that wants more rows to its place in the order."""
        self.prompts.append((sequence, wanted))
        self.prompts.sort(key=lambda one: rank(one[0]), reverse=True)

    @property
    def is_alone(self) -> bool:
        """Return True if the first prompt is the only one that gets rows, as far as is known."""
        return self._nobody_passes or (len(self.prompts) < 2 and self.lane is None)

    def _passing(self, start: Start) -> tuple[Sequence, int] | None:
        first = self.prompts[-1][0].num_uncomputed
        if self.lane is not None:
            started = start(self.lane, first)
            if started is not None:
                return started
        briefest = min(self.prompts, key=lambda one: one[0].num_uncomputed)
        if not may_pass(briefest[0].num_uncomputed, first):
            return None
        self.prompts.remove(briefest)
        return briefest


def _start(
    state: State, builder: PlanBuilder, lane: Lane, beside: int | None
) -> tuple[Sequence, int] | None:
    sequence = _start_next(state, builder, lane, beside=beside)
    if sequence is None:
        return None
    num_left = sequence.num_uncomputed
    return sequence, rows_of_step(state, sequence, sequence.num_computed, num_left)


def _start_next(
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
