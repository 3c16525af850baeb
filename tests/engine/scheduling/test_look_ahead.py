"""Planning for sequences whose latest token is still being computed."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import pytest
from support.simulation.plan_judge import num_results

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.plan import Plan, Sampled, StepLoad
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits

EOS = 2
Row = tuple[str, int, int, bool, bool]  # request, first row, rows, samples, follows


@dataclass
class Pipeline:
    scheduler: Scheduler

    def plan(self) -> Plan:
        plan = self.scheduler.plan(now=0.0)
        assert plan is not None
        self.scheduler.check_invariants()
        return plan

    def commit(self, plan: Plan, *tokens: int) -> list[tuple[str, int, FinishReason | None]]:
        updates = self.scheduler.commit(plan, [Sampled(token) for token in tokens])
        self.scheduler.check_invariants()
        assert all(len(update.token_ids) == 1 for update in updates)
        return [(u.sequence.request.request_id, u.token_ids[0], u.finish_reason) for u in updates]


def pipeline(num_blocks: int = 32, *, rows: int = 16, look_ahead: bool = True) -> Pipeline:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=rows, context_length=100)
    return Pipeline(Scheduler(BlockManager(num_blocks, 4), limits, (EOS,), look_ahead=look_ahead))


def add(engine: Pipeline, name: str, length: int, **sampling: object) -> None:
    first = 1000 * ord(name[0])
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(range(first, first + length)),
        sampling=SamplingParams(**{"max_tokens": None, **sampling}),  # type: ignore[arg-type]
    )
    engine.scheduler.add(request, now=0.0)


def rows(plan: Plan) -> list[Row]:
    return [
        (e.sequence.request.request_id, e.start, e.num_tokens, e.samples, e.follows)
        for e in plan.scheduled
    ]


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}])
def test_a_decode_row_follows_the_token_that_is_not_known_yet(sampling: dict[str, float]) -> None:
    engine = pipeline()
    add(engine, "a", 3, **sampling)
    first, second = engine.plan(), engine.plan()
    assert rows(first) == [("a", 0, 3, True, False)]
    assert rows(second) == [("a", 3, 1, True, True)]
    assert engine.scheduler.plan(now=0.0) is None, "one plan ahead, no more"
    assert engine.commit(first, 50) == [("a", 50, None)]
    third = engine.plan()
    assert rows(third) == [("a", 4, 1, True, True)]
    assert engine.commit(second, 51) == [("a", 51, None)]
    (sequence,) = engine.scheduler.sequences()
    assert sequence.token_ids[3:] == [50, 51]
    assert sequence.num_computed == 4


def test_without_it_sequences_in_flight_are_left_alone() -> None:
    engine = pipeline(look_ahead=False)
    add(engine, "a", 3)
    engine.plan()
    assert engine.scheduler.plan(now=0.0) is None


class Waiting:
    """Waits for results and then proposes drafts, if told so."""

    waits = False

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        """See `Speculates`; each sequence's next token is being computed."""
        assert room > 0
        assert all(most > 0 for _, _, most in answers)
        return self.waits

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """See `Speculates`."""
        return {one: (51, 52) for one, _, most in answers if most and self.waits}

    def check(self, request: Request) -> None: ...
    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None: ...
    def end(self, sequence: Sequence) -> None: ...


def test_nothing_is_planned_behind_drafts_nor_while_they_promise_more() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, context_length=100)
    drafts = Waiting()
    blocks = BlockManager(32, 4)
    engine = Pipeline(Scheduler(blocks, limits, (EOS,), look_ahead=True, speculator=drafts))
    add(engine, "a", 3)
    first, second = engine.plan(), engine.plan()
    assert rows(second) == [("a", 3, 1, True, True)], "it plans ahead while nothing is promised"
    engine.commit(first, 50)
    drafts.waits = True
    assert engine.scheduler.plan(now=0.0) is None
    engine.commit(second, 50)
    third = engine.plan()
    assert [entry.drafts for entry in third.scheduled] == [(51, 52)]
    drafts.waits = False
    assert engine.scheduler.plan(now=0.0) is None, "its next row depends on what is accepted"
    updates = engine.scheduler.commit(third, [Sampled(51), Sampled(60), Sampled(61)])
    assert [update.token_ids for update in updates] == [(51, 60)]
    assert rows(engine.plan()) == [("a", 6, 1, True, False)]


def test_chunks_of_a_prompt_are_planned_one_ahead() -> None:
    engine = pipeline(rows=8)
    add(engine, "a", 20)
    plans = [engine.plan(), engine.plan()]
    assert rows(plans[0]) == [("a", 0, 8, False, False)]
    assert rows(plans[1]) == [("a", 8, 8, False, False)]
    assert engine.commit(plans[0]) == []
    plans.append(engine.plan())
    assert rows(plans[2]) == [("a", 16, 4, True, False)]


@pytest.mark.parametrize("sampling", [{"max_tokens": 2}, {"max_tokens": 90}])
def test_nothing_is_planned_behind_a_length_that_is_known(sampling: dict[str, int]) -> None:
    engine = pipeline()
    length = 98 if sampling["max_tokens"] == 90 else 4  # the context of 100 or max_tokens ends it
    engine = pipeline(rows=100)
    add(engine, "a", length, **sampling)
    first, second = engine.plan(), engine.plan()
    assert engine.commit(first, 50) == [("a", 50, None)]
    assert engine.scheduler.plan(now=0.0) is None
    assert engine.commit(second, 51) == [("a", 51, FinishReason.LENGTH)]
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("sampling", [{"stop_token_ids": (50,)}, {}])
def test_a_stop_that_is_found_late_drops_the_row_and_keeps_its_blocks_until_then(
    sampling: dict[str, object],
) -> None:
    engine = pipeline(num_blocks=2)
    add(engine, "a", 4, **sampling)
    first, second = engine.plan(), engine.plan()
    (sequence,) = engine.scheduler.sequences()
    stop = 50 if sampling else EOS
    assert engine.commit(first, stop) == [("a", stop, FinishReason.STOP)]
    assert not engine.scheduler.has_work
    assert len(sequence.block_table) == 2, "the row in flight writes to it"
    add(engine, "b", 7)
    assert engine.scheduler.plan(now=0.0) is None
    assert engine.commit(second, 51) == []
    assert sequence.token_ids[4:] == [stop]
    assert not sequence.block_table
    assert rows(engine.plan()) == [("b", 0, 7, True, False)]


def test_an_abort_with_two_plans_in_flight_frees_with_the_second() -> None:
    engine = pipeline()
    add(engine, "a", 4)
    first, second = engine.plan(), engine.plan()
    assert engine.scheduler.abort("a")
    assert engine.commit(first, 50) == []
    assert engine.scheduler.stats().blocks_active == 2
    assert engine.commit(second, 51) == []
    assert engine.scheduler.stats().blocks_active == 0


def test_discarded_plans_forget_tokens_that_nobody_saw() -> None:
    engine = pipeline()
    add(engine, "a", 4)
    engine.plan()
    engine.plan()
    engine.scheduler.discard_plans()
    engine.scheduler.check_invariants()
    assert rows(engine.plan()) == [("a", 0, 4, True, False)]


def test_who_lacks_a_block_gets_it_from_one_that_would_always_be_in_flight() -> None:
    engine = pipeline(num_blocks=4)
    add(engine, "a", 7)
    add(engine, "b", 3)
    in_flight = [engine.plan()]
    preempted: list[str] = []
    for _ in range(12):
        in_flight.append(engine.plan())
        preempted += [s.request.request_id for s in in_flight[-1].preempted]
        plan = in_flight.pop(0)
        engine.commit(plan, *[50] * num_results(plan))
        if preempted:
            break
    assert preempted == ["b"]
    assert [row[0] for row in rows(in_flight[-1])] == ["a"]
