"""The scheduler against a model that computes nothing but what it reads through block tables.

A slot holds a hash of the previous slot's content and the token, so each slot depends on all
before it; the next token is a hash of every slot that the table leads to. A wrong, stale or
missing block therefore changes the answer, and the right answer is known without any cache.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.plan import Plan, Sampled, ScheduledSequence
from appliance.engine.request import FinishReason, Request, SamplingParams
from appliance.engine.scheduling.policy import may_admit
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.sequence import Sequence, SequenceStatus
from appliance.errors import RequestError

pytestmark = pytest.mark.no_cover  # millions of steps through what other tests cover

VOCAB = 11
EOS = 3
BASE = [5, 7, 5, 8, 9, 5, 1, 1, 2, 6, 4, 0, 8, 8, 7, 1, 0, 5]  # prompts begin with a part of this

seen: Counter[str] = Counter()  # how often what matters came up


def content(salt: str, previous: int, token: int) -> int:
    return hash((len(salt), previous, token))


def next_token(contents: list[int], index: int) -> int:
    return hash((index, *contents)) % VOCAB


def right_answer(request: Request, index: int, limit: int) -> tuple[list[int], FinishReason]:
    """What a sequence must produce, wherever its blocks are and whatever else runs.

    Args:
        limit: most tokens that one sequence can have.
    """
    sampling, tokens, contents = request.sampling, list(request.prompt_token_ids), [0]
    answer: list[int] = []
    stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
    while True:
        while len(contents) <= len(tokens):
            token = tokens[len(contents) - 1]
            contents.append(content(request.cache_salt, contents[-1], token))
        token = next_token(contents[1:], index)
        answer.append(token)
        tokens.append(token)
        if token in stops and len(answer) > sampling.min_tokens:
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens or len(tokens) >= limit:
            return answer, FinishReason.LENGTH


@dataclass
class EchoModel:
    """Runs plans on slots of integers.

    With sealed blocks, rows are written to the open pages of a plan, and read there in their own
    block only; a block's slots are written once, when its page is full.
    """

    block_size: int
    shuffle: random.Random
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    pages: dict[tuple[int, int], int] = field(default_factory=dict)

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return sequence.block_table[index], offset

    def read(self, entry: ScheduledSequence, opened: tuple[int, ...] | None) -> list[int]:
        """What an entry's rows find before them."""
        size, own = self.block_size, entry.start // self.block_size * self.block_size
        sealed = entry.start if opened is None else own
        found = [self.slots[self.place(entry.sequence, p)] for p in range(sealed)]
        return found + [self.pages[opened[0], p % size] for p in range(own, entry.start) if opened]

    def write(
        self, entry: ScheduledSequence, opened: tuple[int, ...] | None, position: int, value: int
    ) -> None:
        block, offset = self.place(entry.sequence, position)
        if opened is None:
            self.slots[block, offset] = value
            return
        page = opened[position // self.block_size - entry.start // self.block_size]
        self.pages[page, offset] = value
        if offset + 1 == self.block_size:
            for at in range(self.block_size):
                self.slots[block, at] = self.pages[page, at]

    def run(self, plan: Plan) -> list[int]:
        opened = dict.fromkeys(plan.scheduled) if plan.open_pages is None else {}
        opened.update(zip(plan.scheduled, plan.open_pages or (), strict=False))
        # Neither copies nor sequences may depend on the order in which they run.
        for copy in self.shuffle.sample(plan.copies, len(plan.copies)):
            for offset in range(self.block_size):
                self.slots[copy.destination, offset] = self.slots.get((copy.source, offset), -1)
                content_of = self.pages.get((copy.open_source, offset), -1)
                self.pages[copy.open_destination, offset] = content_of
        tokens: dict[Sequence, int] = dict.fromkeys([e.sequence for e in plan.scheduled], -1)
        for entry in self.shuffle.sample(plan.scheduled, len(plan.scheduled)):
            sequence = entry.sequence
            if sequence.status is SequenceStatus.FINISHED and entry.follows:
                continue  # its row's token may never have come
            contents = self.read(entry, opened[entry])
            for position in range(entry.start, entry.start + entry.num_tokens):
                previous = contents[-1] if contents else 0
                token = sequence.token_ids[position]
                contents.append(content(sequence.request.cache_salt, previous, token))
                self.write(entry, opened[entry], position, contents[-1])
            tokens[sequence] = next_token(contents, sequence.index)
        return [tokens[entry.sequence] for entry in plan.scheduled if entry.samples]


@dataclass(frozen=True)
class Load:
    num_blocks: int
    block_size: int
    limits: SchedulerLimits
    prefix_caching: bool
    depth: int  # plans in flight at once
    look_ahead: bool
    sealed: bool
    requests: tuple[tuple[int, Request], ...]  # step of arrival
    aborts: tuple[tuple[int, bool, int, int | None], ...]  # step, within a step?, request, index
    failures: tuple[int, ...]  # steps at which everything in flight fails
    eager: bool  # admit whatever fits at this moment, at the price of many preemptions
    seed: int


class Simulation:
    def __init__(self, load: Load) -> None:
        self.load = load
        limits = load.limits
        num_open = num_open_pages(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            load.block_size,
            plans=load.depth,
        )
        self.blocks = BlockManager(
            load.num_blocks,
            load.block_size,
            prefix_caching=load.prefix_caching,
            num_open=num_open if load.sealed else 0,
        )
        self.scheduler = Scheduler(self.blocks, load.limits, (EOS,), look_ahead=load.look_ahead)
        self.model = EchoModel(load.block_size, random.Random(load.seed))
        self.sequences: list[Sequence] = []
        self.emitted: dict[Sequence, list[int]] = {}
        self.endings: Counter[Sequence] = Counter()
        self.in_flight: list[tuple[Plan, list[list[int]]]] = []
        self.step = 0

    def run(self) -> None:
        last = max((step for step, _ in self.load.requests), default=0)
        while self.step <= last or self.scheduler.has_work or self.in_flight:
            assert self.step < 1000, "no end in sight"
            self.arrive()
            self.abort(within=False)
            planned = self.plan()
            self.scheduler.check_invariants()
            self.abort(within=True)
            if self.step in self.load.failures:
                self.fail()
            self.scheduler.check_invariants()
            while self.in_flight and (len(self.in_flight) >= self.load.depth or not planned):
                self.commit()
            self.scheduler.check_invariants()
            self.step += 1
        self.check_outcome()

    def arrive(self) -> None:
        for step, request in self.load.requests:
            if step != self.step:
                continue
            length = len(request.prompt_token_ids)
            fits = length < self.load.limits.context_length and length < self.blocks.num_slots
            before = set(self.scheduler.sequences())
            try:
                self.scheduler.add(request, now=float(self.step))
            except RequestError:
                assert not fits
                assert set(self.scheduler.sequences()) == before
                seen["refused"] += 1
            else:
                assert fits
                new = [seq for seq in self.scheduler.sequences() if seq not in before]
                assert [seq.index for seq in new] == list(range(request.sampling.n))
                self.sequences += new

    def abort(self, *, within: bool) -> None:
        for step, in_step, number, index in self.load.aborts:
            if step == self.step and in_step == within:
                request_id = str(number)
                live = any(
                    seq.request.request_id == request_id and index in (None, seq.index)
                    for seq in self.scheduler.sequences()
                )
                assert self.scheduler.abort(request_id, index) == live
                seen["aborted"] += live

    def plan(self) -> bool:
        busy: dict[Sequence, list[ScheduledSequence]] = {}
        for in_flight, _ in self.in_flight:
            for entry in in_flight.scheduled:
                busy.setdefault(entry.sequence, []).append(entry)
        running = [s for s in self.scheduler.sequences() if s.status is SequenceStatus.RUNNING]
        running.sort(key=lambda s: (s.request.priority, s.arrival, s.index))
        plan = self.scheduler.plan(now=float(self.step))
        if plan is None:
            assert self.in_flight or not self.scheduler.has_work, "work, but nothing to run"
            return False
        limits = self.load.limits
        scheduled = [entry.sequence for entry in plan.scheduled]
        assert len(scheduled) == len(set(scheduled))
        again = busy.keys() & set(scheduled)
        assert self.load.look_ahead or not again
        assert all(len(busy[sequence]) == 1 for sequence in again)
        seen["looked ahead"] += len(again)
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        singles = [entry.num_tokens == 1 for entry in plan.scheduled]
        assert singles == sorted(singles, reverse=True)
        targets: set[tuple[int, int]] = set()
        for entry in plan.scheduled:
            seq, end = entry.sequence, entry.start + entry.num_tokens
            assert seq.status is SequenceStatus.RUNNING
            before = busy.get(seq, [])
            coming = sum(other.samples for other in before)
            assert entry.start == seq.num_computed + sum(other.num_tokens for other in before)
            assert entry.samples == (end == len(seq.token_ids) + coming)
            assert entry.follows == (end > len(seq.token_ids))
            if entry.follows:
                assert entry.num_tokens == 1
            seen["followed"] += entry.follows
            places = {self.model.place(seq, position) for position in range(entry.start, end)}
            assert not targets & places
            targets |= places
        held = [block for seq in self.sequences for block in set(seq.block_table)]
        assert all(held.count(block) == 1 for block, _ in targets), "a shared block is written"
        sources = {copy.source for copy in plan.copies}
        destinations = [copy.destination for copy in plan.copies]
        assert len(destinations) == len(set(destinations))
        assert not sources.intersection(destinations)
        assert all(seq.status is SequenceStatus.WAITING for seq in plan.preempted)
        owners = {seq.request.owner for seq in self.scheduler.sequences()}
        enough = limits.max_num_batched_tokens >= limits.max_num_seqs
        if running and len(owners) == 1 and not self.in_flight and enough:
            assert running[0] in scheduled, "the first in rank stands still"
        seen["steps"] += 1
        seen["copies"] += len(plan.copies)
        seen["copies of open pages"] += sum(copy.open_source >= 0 for copy in plan.copies)
        seen["preempted"] += len(plan.preempted)
        seen["mixed steps"] += len({entry.num_tokens > 1 for entry in plan.scheduled}) == 2
        self.in_flight.append((plan, [list(seq.block_table) for seq in scheduled]))
        return True

    def fail(self) -> None:
        seen["failed plans"] += len(self.in_flight)
        self.in_flight.clear()
        self.scheduler.discard_plans()

    def commit(self) -> None:
        plan, tables = self.in_flight.pop(0)
        for entry, table in zip(plan.scheduled, tables, strict=True):
            now = list(entry.sequence.block_table)
            assert now[: len(table)] == table, "blocks left a plan in flight"
            assert now == table or self.load.look_ahead
            if entry.follows and entry.sequence.status is SequenceStatus.FINISHED:
                seen["rows for nothing"] += 1
        for update in self.scheduler.commit(plan, list(map(Sampled, self.model.run(plan)))):
            assert update.sequence not in self.endings
            self.emitted.setdefault(update.sequence, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.endings[update.sequence] += 1
                assert update.sequence.finish_reason is update.finish_reason

    def check_outcome(self) -> None:
        limit = min(self.load.limits.context_length, self.blocks.num_slots + 1)
        for seq in self.sequences:
            assert seq.status is SequenceStatus.FINISHED
            answer = self.emitted.get(seq, [])
            assert seq.token_ids == [*seq.request.prompt_token_ids, *answer]
            expected, reason = right_answer(seq.request, seq.index, limit)
            if seq.finish_reason is FinishReason.ABORT:
                assert seq not in self.endings
                assert answer == expected[: len(answer)]
            else:
                assert (answer, seq.finish_reason) == (expected, reason)
                assert self.endings[seq] == 1
            seen["cached tokens"] += seq.num_cached
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
        assert stats.generation_tokens_total == sum(map(len, self.emitted.values()))
        assert stats.blocks_cached + stats.blocks_free == self.load.num_blocks


def fits_now(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    return cost <= num_free_blocks


@st.composite
def requests(draw: st.DrawFn, number: int) -> tuple[int, Request]:
    shared = draw(st.integers(0, len(BASE)))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=6))
    max_tokens = draw(st.one_of(st.integers(1, 20), st.none()))
    request = Request(
        request_id=str(number),
        prompt_token_ids=(*BASE[:shared], *own),
        sampling=SamplingParams(
            n=draw(st.sampled_from([1, 1, 2, 4])),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, min(4, max_tokens or 4))),
            stop_token_ids=draw(st.sampled_from([(), (4,)])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
            ignore_eos=draw(st.booleans()),
        ),
        priority=draw(st.sampled_from([0, 0, 1])),
        cache_salt=draw(st.sampled_from(["", "", "x"])),
        owner=draw(st.sampled_from(["", "", "a", "b"])),
    )
    return draw(st.integers(0, 25)), request


@st.composite
def loads(draw: st.DrawFn) -> Load:
    number = draw(st.integers(1, 9))
    step = st.integers(0, 40)
    return Load(
        num_blocks=draw(st.integers(4, 20)),
        block_size=draw(st.sampled_from([1, 2, 2, 3, 4])),
        limits=SchedulerLimits(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(1, 16)),
            context_length=draw(st.integers(10, 40)),
        ),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        depth=draw(st.sampled_from([1, 1, 2, 3])),
        look_ahead=draw(st.booleans()),
        sealed=draw(st.booleans()),
        requests=tuple(draw(requests(index)) for index in range(number)),
        aborts=tuple(
            draw(
                st.lists(
                    st.tuples(
                        step,
                        st.booleans(),
                        st.integers(0, number - 1),
                        st.sampled_from([None, None, 0, 1]),
                    ),
                    max_size=4,
                )
            )
        ),
        failures=tuple(draw(st.lists(step, max_size=2))),
        eager=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(loads())
def check_load(load: Load) -> None:
    admission = fits_now if load.eager else may_admit
    with patch("appliance.engine.scheduling.admission.may_admit", admission):
        Simulation(load).run()


def test_every_load_ends_with_the_right_answers() -> None:
    check_load()
    assert min(seen.values()) >= 10, f"the loads hardly touch something: {seen}"
    assert seen["steps"] >= 3000
