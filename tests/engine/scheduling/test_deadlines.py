from __future__ import annotations

import pytest
from support.simulation.plan_judge import num_results

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.limits import SchedulerLimits
from appliance.engine.nouns.plan import Sampled
from appliance.engine.nouns.request import MAX_TIMEOUT, FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence, SequenceStatus
from appliance.engine.scheduling.deadlines import Deadlines, was_started, why_refused
from appliance.engine.scheduling.scheduler import Scheduler
from appliance.errors import RequestError


def request(
    name: str, *, timeout: float | None = None, queue: float | None = None, n: int = 1
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(10)),
        sampling=SamplingParams(max_tokens=50, n=n),
        timeout=timeout,
        max_queue_seconds=queue,
    )


def scheduler(seqs: int = 1) -> Scheduler:
    return Scheduler(BlockManager(64, 4), SchedulerLimits(seqs, 16, 100))


def step(engine: Scheduler, now: float) -> None:
    plan = engine.plan(now)
    assert plan is not None
    engine.commit(plan, [Sampled(50)] * num_results(plan))
    engine.check_invariants()


def over(engine: Scheduler, now: float) -> list[Sequence]:
    """The sequences whose time is over now."""
    updates = engine.expire(now)
    assert all(update.finish_reason is FinishReason.TIMEOUT for update in updates)
    return [update.sequence for update in updates]


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


@pytest.mark.parametrize("limits", [{"timeout": 5.0}, {"queue": 5.0}, {"timeout": 5, "queue": 9}])
def test_a_waiting_request_ends_when_its_time_is_over(limits: dict[str, float]) -> None:
    engine = scheduler()
    engine.add(request("runs"), now=0.0)
    step(engine, 0.0)
    engine.add(request("waits", **limits), now=1.0)  # type: ignore[arg-type]
    assert over(engine, 5.9) == []
    (sequence,) = over(engine, 6.0)
    assert sequence.finish_reason is FinishReason.TIMEOUT
    assert sequence.num_computed == 0
    assert not was_started(sequence)
    engine.check_invariants()
    assert [s.request.request_id for s in engine.sequences()] == ["runs"]
    assert engine.stats().expired_total == 1
    assert over(engine, 100.0) == []


def test_the_limit_of_the_queue_does_not_touch_what_was_started() -> None:
    engine = scheduler()
    engine.add(request("a", queue=5.0), now=0.0)
    step(engine, 1.0)
    assert over(engine, 50.0) == []


def test_a_running_request_ends_with_what_it_has() -> None:
    engine = scheduler()
    engine.add(request("a", timeout=5.0), now=0.0)
    for now in range(4):
        step(engine, float(now))
    (sequence,) = over(engine, 5.0)
    assert was_started(sequence)
    assert sequence.num_output_tokens == 4
    assert engine.stats().blocks_active == 0
    assert engine.plan(6.0) is None


def test_a_request_in_flight_keeps_its_blocks_until_commit() -> None:
    engine = scheduler()
    engine.add(request("a", timeout=5.0), now=0.0)
    plan = engine.plan(0.0)
    assert plan is not None
    assert names(over(engine, 5.0)) == ["a"]
    engine.check_invariants()
    assert engine.stats().blocks_active > 0
    assert engine.commit(plan, [Sampled(50)]) == []
    assert engine.stats().blocks_active == 0


def test_all_choices_end_once_and_count_as_one_request() -> None:
    engine = scheduler(seqs=2)
    engine.add(request("a", timeout=5.0, queue=5.0, n=4), now=0.0)
    for now in range(3):
        step(engine, float(now))
    ended = over(engine, 5.0)
    assert sorted(sequence.index for sequence in ended) == [0, 1, 2, 3]
    assert all(was_started(sequence) for sequence in ended), "the parked ones too"
    assert engine.stats().expired_total == 1


def test_a_preempted_request_is_not_one_that_was_never_started() -> None:
    engine = scheduler()
    engine.add(request("a", queue=5.0), now=0.0)
    plan = engine.plan(0.0)
    assert plan is not None
    engine.discard_plans()
    (sequence,) = engine.sequences()
    assert sequence.status is SequenceStatus.WAITING
    assert over(engine, 9.0) == []


def test_what_has_ended_is_forgotten() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        sequence = Sequence(request(str(number), timeout=MAX_TIMEOUT))
        deadlines.add(sequence)
        sequence.finish_reason = FinishReason.STOP
    assert len(deadlines.entries) < 200


def test_a_refusal_says_which_limit_it_was() -> None:
    assert "its timeout of 5 s" in why_refused(request("a", timeout=5.0), 5.0)
    assert "its timeout of 5 s" in why_refused(request("a", timeout=5.0, queue=9.0), 5.0)
    assert "the 9 s that this server" in why_refused(request("a", timeout=50.0, queue=9.0), 9.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout", 0.0), ("timeout", float("nan")), ("timeout", 1e9), ("priority", 101)],
)
def test_the_engine_does_not_trust_the_server(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field):
        Request(
            request_id="a",
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
            **{field: value},  # type: ignore[arg-type]
        )
