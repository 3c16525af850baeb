"""Shares a step's rows among prompts, in turns by priority and owner.

`policy` decides whose turn it is and its size. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from appliance.engine.scheduling.admission import start_next
from appliance.engine.scheduling.policy import MAX_STALLS, TURNS, may_stall, turn
from appliance.engine.scheduling.rows import extend, rows_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.scheduling.fairness import Account, Accounts
    from appliance.engine.scheduling.plan_builder import PlanBuilder
    from appliance.engine.scheduling.state import State
    from appliance.engine.scheduling.waiting import Lane
    from appliance.engine.sequence import Sequence


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
    given = share_rows(
        rows,
        demands_of(prompts, lanes, state.accounts),
        lambda lane: _start(state, builder, lane),
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
        if rows and sequence not in builder.entries:
            extend(state, builder, sequence, min(rows, num_left))
            rows -= builder.num_rows(sequence)
    state.accounts.refund(given, builder.entries)


def _start(state: State, builder: PlanBuilder, lane: Lane) -> tuple[Sequence, int] | None:
    sequence = start_next(state, builder, lane)
    if sequence is None:
        return None
    num_left = sequence.num_uncomputed
    return sequence, rows_of_step(state, sequence, sequence.num_computed, num_left)


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


@dataclass(slots=True, eq=False)
class Demand:
    """An owner's demand at one priority: rows of running prompts, and sequences to start."""

    priority: int
    account: Account
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)  # the next one last
    lane: Lane | None = None

    def key(self) -> tuple[int, int, int]:
        """Rank for the next turn, lowest first."""
        return turn(self.priority, self.account)


def demands_of(
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


def share_rows(
    rows: int, demands: list[Demand], start: Callable[[Lane], tuple[Sequence, int] | None]
) -> dict[Sequence, int]:
    """Divide rows among prompts, and charge their owners.

    Args:
        demands: consumed.
        start: starts a waiting sequence of a lane and returns it with the rows it wants, or None.

    Returns:
        Rows of each sequence, at least 1.
    """
    given: dict[Sequence, int] = {}
    portion = max(1, rows // TURNS)
    while rows and demands:
        demand = demands[0] if len(demands) == 1 else min(demands, key=Demand.key)
        if not demand.prompts:
            started = None if demand.lane is None else start(demand.lane)
            if started is None:
                demands.remove(demand)
                continue
            demand.prompts.append(started)
        sequence, wanted = demand.prompts.pop()
        taken = min(wanted, rows if len(demands) == 1 else min(portion, rows))
        given[sequence] = given.get(sequence, 0) + taken
        demand.account.served += taken
        rows -= taken
        if taken < wanted:
            demand.prompts.append((sequence, wanted - taken))
    return given
