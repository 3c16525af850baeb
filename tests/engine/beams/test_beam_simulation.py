"""Beam searches among other requests, against a model that computes nothing but what it reads."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reading_model import (
    BASE,
    EOS,
    STOP,
    TEXTS,
    VOCAB,
    ReadingModel,
    right_answer,
    right_answers,
    stops,
)

from appliance.engine.beams.beam_group import BeamGroup
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.limits import max_beam_tokens
from appliance.engine.plan import Plan, Sampled
from appliance.engine.request import FinishReason, Request, SamplingParams
from appliance.engine.scheduling.policy import may_admit
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.errors import RequestError

pytestmark = pytest.mark.no_cover  # millions of steps through what other tests cover

if TYPE_CHECKING:
    from appliance.engine.sequence import Sequence

seen: Counter[str] = Counter()  # how often what matters came up


@dataclass(frozen=True)
class Load:
    num_blocks: int
    block_size: int
    limits: SchedulerLimits
    prefix_caching: bool
    sealed: bool
    share: bool  # whether beams fork at all, or compute everything again
    depth: int  # plans in flight at once
    requests: tuple[tuple[int, Request], ...]  # step of arrival
    aborts: tuple[tuple[int, bool, int], ...]  # step, while a plan is in flight?, request
    failures: tuple[int, ...]  # steps at which everything in flight fails
    eager: bool  # admit whatever fits at this moment, at the price of many preemptions


class Simulation:
    def __init__(self, load: Load) -> None:
        self.load = load
        limits = load.limits
        num_open = num_open_pages(
            limits.max_num_seqs, limits.max_num_batched_tokens, load.block_size, plans=load.depth
        )
        self.blocks = BlockManager(
            load.num_blocks,
            load.block_size,
            prefix_caching=load.prefix_caching,
            num_open=num_open if load.sealed else 0,
        )
        self.scheduler = Scheduler(self.blocks, limits, (EOS,), look_ahead=load.depth > 1)
        self.model = ReadingModel(load.block_size, random.Random(load.num_blocks))
        self.served: list[Request] = []
        self.answers: dict[tuple[str, int], tuple[int, ...]] = {}
        self.aborted: set[str] = set()
        self.in_flight: list[Plan] = []

    def run(self) -> None:
        step, last = 0, max(step for step, _ in self.load.requests)
        while step <= last or self.scheduler.has_work or self.in_flight:
            assert step < 3000, "no end in sight"
            for arrival, request in self.load.requests:
                if arrival == step:
                    self.add(request, float(step))
            self.abort(step, within=False)
            plan = self.scheduler.plan(float(step))
            if plan is None:
                assert self.in_flight or not self.scheduler.has_work, "work, but nothing to run"
            else:
                self.look_at(plan)
                self.in_flight.append(plan)
            self.scheduler.check_invariants()
            self.abort(step, within=True)
            if step in self.load.failures:
                seen["failed plans"] += len(self.in_flight)
                self.in_flight.clear()
                self.scheduler.discard_plans()
            self.scheduler.check_invariants()
            while self.in_flight and (len(self.in_flight) >= self.load.depth or plan is None):
                self.commit(self.in_flight.pop(0))
            self.scheduler.check_invariants()
            step += 1
        self.check_outcome()

    def max_tokens(self, request: Request) -> int:
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        most = min(self.load.limits.context_length, self.blocks.num_slots + 1)
        if sampling.use_beam_search:
            width, size = sampling.num_sequences, self.load.block_size
            most = min(most, max_beam_tokens(num_prompt, width, size, self.load.num_blocks))
        return min(most - num_prompt, sampling.max_tokens or most)

    def add(self, request: Request, now: float) -> None:
        width = request.sampling.num_sequences
        fits = self.max_tokens(request) > 0 and len(request.prompt_token_ids) < min(
            self.load.limits.context_length, self.blocks.num_slots
        )
        if request.sampling.use_beam_search:
            fits = fits and width <= self.load.limits.max_num_seqs
        try:
            self.scheduler.add(request, now)
        except RequestError:
            assert not fits
            seen["refused"] += 1
        else:
            assert fits
            self.served.append(request)

    def abort(self, step: int, *, within: bool) -> None:
        for when, in_step, number in self.load.aborts:
            if (when, in_step) == (step, within) and self.scheduler.abort(str(number)):
                seen["aborted"] += 1
                self.aborted.add(str(number))

    def look_at(self, plan: Plan) -> None:
        """Nothing is written that somebody else reads."""
        sequences = list(self.scheduler.sequences())
        held = Counter(block for one in sequences for block in one.block_table)
        size = self.load.block_size
        for entry in plan.scheduled:
            table = entry.sequence.block_table[entry.start // size : -(-entry.end // size)]
            assert all(held[block] == 1 for block in table), "a shared block is written"
        sources = {copy.source for copy in plan.copies}
        destinations = [copy.destination for copy in plan.copies]
        assert len(destinations) == len(set(destinations))
        assert not sources.intersection(destinations)
        seen["copies"] += len(plan.copies)
        seen["preempted beams"] += sum(
            one.request.sampling.use_beam_search for one in plan.preempted
        )
        seen["shared blocks"] += self.blocks.pool.num_shared
        seen["beams without an answer"] += sum(len(g.beams) < len(g.live) for g in self.groups())

    def groups(self) -> list[BeamGroup]:
        """Those that have come past the prompt."""
        groups = {one.group for one in self.scheduler.sequences()}
        searches = [group for group in groups if isinstance(group, BeamGroup)]
        return [group for group in searches if group.live[0].num_output_tokens]

    def commit(self, plan: Plan) -> None:
        found = self.model.run(plan)
        follows = [found[entry.sequence] for entry in plan.scheduled if entry.samples]
        sampled = [Sampled(one.candidates[0].token_id, continuations=one) for one in follows]
        for update in self.scheduler.commit(plan, sampled):
            request = update.sequence.request
            key = request.request_id, update.sequence.index
            assert key not in self.answers or not request.sampling.use_beam_search
            self.answers[key] = (*self.answers.get(key, ()), *update.token_ids)
            if request.sampling.use_beam_search:
                ends = stops(request, update.token_ids)
                assert update.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)

    def check_outcome(self) -> None:
        for request in self.served:
            if request.request_id in self.aborted:
                continue
            most, n = self.max_tokens(request), request.sampling.n
            found = [self.answers[request.request_id, index] for index in range(n)]
            if request.sampling.use_beam_search:
                assert found == right_answers(request, most)
                seen["searches"] += 1
            else:
                assert found == [right_answer(request, most)] * n
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
        assert stats.blocks_cached + stats.blocks_free == self.load.num_blocks
        seen["steps"] += stats.steps_total


def fits_now(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    return cost <= num_free_blocks


def share_nothing(blocks: BlockManager, parent: Sequence, child: Sequence, num_tokens: int) -> None:
    child.block_hashes = []
    child.num_computed = 0


@st.composite
def requests(draw: st.DrawFn, number: int) -> tuple[int, Request]:
    shared = draw(st.integers(0, len(BASE)))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=6))
    searches = draw(st.sampled_from([True, True, False]))
    width = draw(st.integers(2, 4))
    sampling = SamplingParams(
        n=draw(st.integers(1, width)),
        best_of=width if searches else None,
        use_beam_search=searches,
        length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])) if searches else 1.0,
        early_stopping=draw(st.sampled_from([True, False, "never"])) if searches else False,
        max_tokens=draw(st.one_of(st.integers(10, 20), st.none())),
        min_tokens=draw(st.integers(0, 9)) if searches else 0,
        stop=draw(st.sampled_from([(), (STOP,)])) if searches else (),
    )
    request = Request(
        request_id=str(number),
        prompt_token_ids=(*BASE[:shared], *own),
        sampling=sampling,
        priority=draw(st.sampled_from([0, 0, 1])),
        stop_pieces={t: x.encode() for t, x in enumerate(TEXTS) if not x or set(x) & set(STOP)},
    )
    return draw(st.integers(0, 8)), request


@st.composite
def loads(draw: st.DrawFn) -> Load:
    number, size = draw(st.integers(3, 8)), draw(st.sampled_from([1, 2, 2, 3, 4]))
    step = st.integers(0, 40)
    abort = st.tuples(step, st.booleans(), st.integers(0, number - 1))
    share = draw(st.sampled_from([True, True, True, False]))
    return Load(
        # What a search may take is reckoned with the prompt shared.
        num_blocks=draw(st.integers(32, 56)) // size if share else 400,
        block_size=size,
        limits=SchedulerLimits(
            max_num_seqs=draw(st.integers(2, 12)),
            max_num_batched_tokens=draw(st.integers(3, 24)),
            context_length=draw(st.integers(20, 40)),
        ),
        prefix_caching=draw(st.booleans()),
        sealed=draw(st.booleans()),
        share=share,
        depth=draw(st.sampled_from([1, 1, 2])),
        requests=tuple(draw(requests(index)) for index in range(number)),
        aborts=tuple(draw(st.lists(abort, max_size=2))),
        failures=tuple(draw(st.lists(step, max_size=2))),
        eager=draw(st.sampled_from([True, True, False])),
    )


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(loads())
def check_load(load: Load) -> None:
    admission = fits_now if load.eager else may_admit
    fork = BlockManager.fork if load.share else share_nothing
    with (
        patch("appliance.engine.scheduling.admission.may_admit", admission),
        patch.object(BlockManager, "fork", fork),
    ):
        Simulation(load).run()


def test_every_search_ends_with_the_right_answers() -> None:
    check_load()
    assert min(seen.values()) >= 2, f"the loads hardly touch something: {seen}"
    assert seen["steps"] >= 2000
