from __future__ import annotations

import pytest
from support.simulation.plan_judge import num_results

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.limits import Bounds, reason_to_finish
from appliance.engine.nouns.plan import Plan, Sampled
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence, SequenceStatus
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.errors import ContextLengthError, RequestError

EOS = 2


def request(
    name: str,
    prompt: range | list[int],
    *,
    priority: int = 0,
    salt: str = "",
    sampling: SamplingParams | None = None,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(max_tokens=None),
        priority=priority,
        cache_salt=salt,
    )


def scheduler(
    num_blocks: int = 32, *, seqs: int = 8, rows: int = 16, context: int = 100
) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4), SchedulerLimits(seqs, rows, context), (EOS,))


def rows(plan: Plan | None) -> list[tuple[str, int, int, int, bool]]:
    """Request, choice, first row, number of rows, and whether it samples."""
    assert plan is not None
    return [
        (e.sequence.request.request_id, e.sequence.index, e.start, e.num_tokens, e.samples)
        for e in plan.scheduled
    ]


def step(engine: Scheduler, token: int = 50) -> Plan:
    plan = engine.plan(now=0.0)
    assert plan is not None
    engine.commit(plan, [Sampled(token)] * num_results(plan))
    engine.check_invariants()
    return plan


def by_name(engine: Scheduler) -> dict[tuple[str, int], Sequence]:
    return {(seq.request.request_id, seq.index): seq for seq in engine.sequences()}


def test_nothing_to_do_is_no_plan() -> None:
    engine = scheduler()
    assert engine.plan(now=0.0) is None
    assert not engine.has_work
    assert engine.stats().steps_total == 0


def test_prompts_run_in_chunks_beside_decodes() -> None:
    engine = scheduler(rows=8)
    engine.add(request("a", range(3)), now=1.0)
    engine.add(request("b", range(100, 120)), now=2.0)
    first = engine.plan(now=5.0)
    assert rows(first) == [("a", 0, 0, 3, True), ("b", 0, 0, 5, False)]
    assert first is not None
    assert first.started == ("a", "b")
    updates = engine.commit(first, [Sampled(50)])
    assert [(u.sequence.request.request_id, u.token_ids) for u in updates] == [("a", (50,))]
    assert by_name(engine)["b", 0].first_scheduled == 5.0
    assert rows(step(engine)) == [("a", 0, 3, 1, True), ("b", 0, 5, 7, False)]
    assert rows(step(engine)) == [("a", 0, 4, 1, True), ("b", 0, 12, 7, False)]
    assert rows(step(engine)) == [("a", 0, 5, 1, True), ("b", 0, 19, 1, True)]
    assert engine.stats().step_decode_tokens == 1
    assert engine.stats().step_prefill_tokens == 1
    assert rows(step(engine)) == [("a", 0, 6, 1, True), ("b", 0, 20, 1, True)]


def test_admission_is_by_priority_then_arrival() -> None:
    engine = scheduler(seqs=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        engine.add(request(name, range(3), priority=priority), now=1.0)
    order = []
    while engine.has_work:
        plan = step(engine, token=EOS)
        order += list(plan.started)
    assert order == ["first", "second", "late"]


def test_choices_share_the_prompt_and_copy_only_its_last_block() -> None:
    engine = scheduler()
    engine.add(request("a", range(10), sampling=SamplingParams(n=3, max_tokens=9)), now=0.0)
    assert rows(step(engine)) == [("a", 0, 0, 10, True)]
    plan = step(engine)
    assert rows(plan) == [("a", 0, 10, 1, True), ("a", 1, 9, 1, True), ("a", 2, 9, 1, True)]
    assert plan.started == ()
    tables = [seq.block_table for seq in engine.sequences()]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert {copy.source for copy in plan.copies} == {tables[0][2]}
    assert [copy.destination for copy in plan.copies] == [tables[1][2], tables[2][2]]
    assert engine.stats().blocks_active == 5
    assert engine.stats().blocks_shared == 2
    assert engine.stats().kv_tokens == 8 + 3 + 2 + 2


def test_choices_of_a_prompt_that_ends_a_block_copy_nothing_they_do_not_rewrite() -> None:
    engine = scheduler()
    engine.add(request("a", range(9), sampling=SamplingParams(n=2, max_tokens=9)), now=0.0)
    step(engine)
    assert step(engine).copies == ()  # the last prompt token has a block of its own


def test_choices_come_through_the_prefix_cache_when_the_parent_has_ended() -> None:
    engine = scheduler(seqs=1)
    engine.add(request("a", range(10), sampling=SamplingParams(n=2, max_tokens=1)), now=0.0)
    step(engine)
    plan = step(engine)
    assert rows(plan) == [("a", 1, 9, 1, True)]
    assert not engine.has_work


def test_the_second_request_with_the_same_prompt_computes_only_its_last_token() -> None:
    engine = scheduler()
    engine.add(request("a", range(12)), now=0.0)
    step(engine)
    engine.add(request("b", range(12)), now=1.0)
    engine.add(request("c", range(12), salt="other"), now=2.0)
    assert rows(step(engine))[1:] == [("b", 0, 11, 1, True), ("c", 0, 0, 12, True)]
    assert by_name(engine)["b", 0].num_cached == 11
    stats = engine.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (36, 11)


def test_the_latest_gives_way_and_keeps_its_tokens() -> None:
    engine = scheduler(num_blocks=5)
    engine.add(request("old", range(8)), now=0.0)
    engine.add(request("new", range(100, 104)), now=1.0)
    step(engine)
    assert len(rows(step(engine))) == 2
    old, new = by_name(engine).values()
    preempted: tuple[Sequence, ...] = ()
    while not preempted:
        preempted = step(engine).preempted
    assert preempted == (new,)
    assert new.status is SequenceStatus.WAITING
    assert (len(new.block_table), new.num_computed, new.num_preemptions) == (0, 0, 1)
    assert old.num_computed == len(old.token_ids) - 1
    answer = new.token_ids[4:]
    assert len(answer) >= 4
    engine.finish(old, FinishReason.STOP)
    plan = engine.plan(now=9.0)
    assert plan is not None
    assert plan.started == ()
    # Its own blocks are still in the cache: only the tokens after them need computing.
    assert rows(plan)[0][2] >= 4
    assert new.token_ids[4:] == answer


def test_a_row_whose_blocks_are_taken_is_not_in_the_plan() -> None:
    engine = scheduler(num_blocks=8, rows=4)
    engine.add(request("behind", range(100, 103), priority=1), now=0.0)
    step(engine)
    engine.add(request("ahead", range(24)), now=1.0)
    preempted: tuple[Sequence, ...] = ()
    while not preempted:
        # The answer of the lower-priority one grows first, into blocks that the prompt will need.
        plan = step(engine)
        preempted = plan.preempted
    assert [seq.request.request_id for seq in preempted] == ["behind"]
    assert [row[0] for row in rows(plan)] == ["ahead"]
    assert by_name(engine)["ahead", 0].num_computed < 24


def test_nobody_is_admitted_into_the_block_that_a_running_answer_grows_into() -> None:
    engine = scheduler(num_blocks=4)
    engine.add(request("a", range(4), sampling=SamplingParams(max_tokens=6)), now=0.0)
    engine.add(request("b", range(100, 112)), now=1.0)
    order = [[row[0] for row in rows(step(engine))] for _ in range(7)]
    assert order == [["a"]] * 6 + [["b"]]
    assert engine.stats().preemptions_total == 0


def test_nobody_is_admitted_into_blocks_that_a_prompt_in_flight_still_needs() -> None:
    engine = scheduler(num_blocks=7, rows=4)
    engine.add(request("big", range(24)), now=0.0)
    engine.add(request("small", range(100, 107)), now=1.0)
    assert rows(engine.plan(now=0.0)) == [("big", 0, 0, 4, False)]
    assert engine.plan(now=0.0) is None
    engine.check_invariants()


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_abort_frees_the_blocks_at_once_between_steps(phase: str) -> None:
    engine = scheduler(rows=4)
    engine.add(request("a", range(6), sampling=SamplingParams(n=2, max_tokens=9)), now=0.0)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 4}[phase]):
        step(engine)
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.check_invariants()
    assert engine.stats().blocks_active == 0
    assert engine.stats().aborted_total == 1
    assert engine.plan(now=0.0) is None
    assert not engine.has_work


def test_abort_within_a_step_keeps_the_blocks_until_commit() -> None:
    engine = scheduler(num_blocks=4)
    engine.add(request("a", range(8)), now=0.0)
    plan = engine.plan(now=0.0)
    assert plan is not None
    (entry,) = plan.scheduled
    table = list(entry.sequence.block_table)
    assert engine.abort("a")
    engine.check_invariants()
    assert list(entry.sequence.block_table) == table
    engine.add(request("b", range(100, 112)), now=1.0)
    assert engine.plan(now=1.0) is None, "the blocks are still being written to"
    assert engine.commit(plan, [Sampled(50)]) == []
    assert entry.sequence.token_ids == list(range(8))
    engine.check_invariants()
    assert engine.stats().blocks_cached == 0, "what an ended sequence computed is not trusted"
    assert rows(engine.plan(now=2.0)) == [("b", 0, 0, 12, True)]


def test_abort_of_one_choice_leaves_the_others() -> None:
    engine = scheduler()
    engine.add(request("a", range(6), sampling=SamplingParams(n=3, max_tokens=9)), now=0.0)
    assert engine.abort("a", 0)
    assert not engine.abort("a", 0)
    assert rows(step(engine)) == [("a", 1, 0, 6, True), ("a", 2, 0, 6, True)]
    assert engine.abort("a", 2)
    assert rows(step(engine)) == [("a", 1, 6, 1, True)]


def test_a_plan_in_flight_is_left_alone_by_the_next_one() -> None:
    engine = scheduler(rows=8)
    engine.add(request("a", range(8)), now=0.0)
    engine.add(request("b", range(100, 108)), now=1.0)
    first = engine.plan(now=0.0)
    second = engine.plan(now=0.0)
    assert rows(first) == [("a", 0, 0, 8, True)]
    assert rows(second) == [("b", 0, 0, 8, True)]
    assert engine.plan(now=0.0) is None
    assert first is not None
    engine.commit(first, [Sampled(50)])
    assert rows(engine.plan(now=0.0)) == [("a", 0, 8, 1, True)]
    engine.check_invariants()


def test_discarded_plans_start_over() -> None:
    engine = scheduler()
    engine.add(request("a", range(6), sampling=SamplingParams(n=2, max_tokens=2)), now=0.0)
    engine.add(request("b", range(100, 105)), now=1.0)
    step(engine)
    plan = engine.plan(now=0.0)
    assert plan is not None
    assert plan.copies
    engine.abort("b")
    engine.discard_plans()
    engine.check_invariants()
    assert engine.stats().blocks_active == 0
    assert engine.stats().preemptions_total == 0
    assert rows(step(engine)) == [("a", 0, 6, 1, True), ("a", 1, 4, 2, True)]


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    engine = scheduler(context=12)
    with pytest.raises(ContextLengthError, match=r"12 tokens.* holds 12 "):
        engine.add(request("a", range(12)), now=0.0)
    assert not engine.has_work
    engine.add(request("a", range(11)), now=0.0)
    plan = engine.plan(now=0.0)
    assert plan is not None
    (update,) = engine.commit(plan, [Sampled(50)])
    assert update.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_fills_the_pool_is_refused_with_both_numbers() -> None:
    engine = scheduler(num_blocks=3)
    with pytest.raises(RequestError, match=r"12 tokens.* holds 12 ") as refusal:
        engine.add(request("a", range(12)), now=0.0)
    assert refusal.value.code == "context_length_exceeded"
    engine.add(request("a", range(11)), now=0.0)
    assert num_results(step(engine)) == 1


def test_an_answer_that_outgrows_the_pool_ends_there() -> None:
    engine = scheduler(num_blocks=3)
    engine.add(request("a", range(9)), now=0.0)
    (seq,) = engine.sequences()
    while engine.has_work:
        step(engine)
    assert seq.finish_reason is FinishReason.LENGTH
    assert len(seq.token_ids) == 13  # the last token never needs a slot
    assert engine.stats().preemptions_total == 0


@pytest.mark.parametrize("prompt", [[], range(100)])
def test_a_refused_request_leaves_nothing_behind(prompt: list[int]) -> None:
    engine = scheduler()
    with pytest.raises(RequestError):
        engine.add(request("a", prompt), now=0.0)
    assert engine.stats().prompt_tokens_total == 0
    engine.add(request("a", range(3)), now=0.0)
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", range(3)), now=0.0)
    engine.check_invariants()


@pytest.mark.parametrize(
    ("answer", "sampling", "reason"),
    [
        ([5], SamplingParams(max_tokens=9), None),
        ([EOS], SamplingParams(max_tokens=9), FinishReason.STOP),
        ([EOS], SamplingParams(max_tokens=9, ignore_eos=True), None),
        ([EOS], SamplingParams(max_tokens=1), FinishReason.STOP),
        ([5], SamplingParams(max_tokens=1), FinishReason.LENGTH),
        ([7], SamplingParams(max_tokens=9, stop_token_ids=(7,)), FinishReason.STOP),
        (
            [7],
            SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True),
            FinishReason.STOP,
        ),
        ([5, EOS], SamplingParams(max_tokens=9, min_tokens=2), None),
        ([5, 5, EOS], SamplingParams(max_tokens=9, min_tokens=2), FinishReason.STOP),
        ([5, 7], SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,)), None),
        ([5, 5], SamplingParams(max_tokens=2, min_tokens=2), FinishReason.LENGTH),
        ([5, 5, 5], SamplingParams(max_tokens=None), None),
        ([5, 5, 5, 5], SamplingParams(max_tokens=None), FinishReason.LENGTH),
    ],
)
def test_reasons_to_finish(
    answer: list[int], sampling: SamplingParams, reason: FinishReason | None
) -> None:
    seq = Sequence(request("a", [1, 1], sampling=sampling))
    seq.token_ids += answer
    bounds = Bounds(SchedulerLimits(1, 8, 6), 8, 4, frozenset({EOS}))
    assert bounds.max_tokens == 6
    assert reason_to_finish(seq, bounds) is reason


def test_stats_count_what_happened() -> None:
    engine = scheduler()
    engine.add(request("a", range(6), sampling=SamplingParams(n=2, max_tokens=3)), now=0.0)
    engine.add(request("b", range(100, 103), sampling=SamplingParams(max_tokens=3)), now=0.0)
    assert (engine.stats().running, engine.stats().waiting) == (0, 3)
    step(engine)
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    while engine.has_work:
        step(engine)
    stats = engine.stats()
    assert stats.prompt_tokens_total == 9
    assert stats.generation_tokens_total == 9
    assert stats.steps_total == 4
    assert (stats.blocks_total, stats.block_size) == (32, 4)
    assert stats.blocks_active == 0
