"""Scheduler and tiers against a model whose next token is a hash of all that it reads.

Blocks are overwritten, saved, loaded and lost at random, steps fail and sequences are aborted;
whatever is read through a block table that is not what belongs there changes an answer.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.moves import BlockLoad, BlockSave, SavedBlock
from appliance.engine.plan import Plan
from appliance.engine.rates import Rates
from appliance.engine.request import Request, SamplingParams
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.sequence import Sequence, SequenceStatus
from appliance.engine.tiers import tiers as tiers_module
from appliance.engine.tiers.disk_tier import ReadJob
from appliance.engine.tiers.tiers import Tiers, TierSizes

pytestmark = pytest.mark.no_cover  # millions of steps through what other tests cover

SIZE = 4
seen: Counter[str] = Counter()


def slot(previous: int, token: int) -> int:
    return hash((previous, token)) & 0xFFFFFFFF


def right_answer(request: Request) -> list[int]:
    tokens, value = list(request.prompt_token_ids), 0
    for token in tokens:
        value = slot(value, token)
    answer: list[int] = []
    assert request.sampling.max_tokens is not None
    while len(answer) < request.sampling.max_tokens:
        answer.append(value % 97)
        value = slot(value, answer[-1])
    return answer


@dataclass
class Memory:
    """A cache of numbers: places are blocks, or open pages of blocks that are not full."""

    sealed: bool
    blocks: dict[int, list[int]] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)

    def read(self, block: int, page: int = -1) -> bytes:
        rows = [*self.blocks.get(block, [0] * SIZE)]
        if page >= 0:
            rows += self.pages.get(page, [0] * SIZE)
        return b"".join(row.to_bytes(4, "big") for row in rows)

    def save(self, saves: tuple[BlockSave, ...]) -> tuple[SavedBlock, ...]:
        return tuple(SavedBlock(self.read(save.block, save.open_page)) for save in saves)

    def load(self, move: BlockLoad, saved: tuple[SavedBlock, ...]) -> None:
        data = bytes(move.content(saved).read())
        rows = [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)]
        assert len(rows) == SIZE * (1 + (move.open_page >= 0))
        self.blocks[move.block] = rows[:SIZE]
        if move.open_page >= 0:
            self.pages[move.open_page] = rows[SIZE:]

    def run(self, plan: Plan, saved: tuple[SavedBlock, ...]) -> list[int]:
        for copy in plan.copies:
            self.blocks[copy.destination] = list(self.blocks.get(copy.source, [0] * SIZE))
            if copy.open_source >= 0:
                self.pages[copy.open_destination] = list(self.pages[copy.open_source])
        for move in plan.loads:
            self.load(move, saved)
        sampled = []
        for number, entry in enumerate(plan.scheduled):
            table = entry.sequence.block_table
            opened = () if plan.open_pages is None else plan.open_pages[number]
            value = self.last(table, opened, entry.start)
            for at in range(entry.start, entry.end):
                value = slot(value, entry.sequence.token_ids[at])
                index, offset = divmod(at, SIZE)
                if not opened:
                    self.blocks.setdefault(table[index], [0] * SIZE)[offset] = value
                    continue
                page = self.pages.setdefault(opened[index - entry.start // SIZE], [0] * SIZE)
                page[offset] = value
                if offset == SIZE - 1:
                    self.blocks[table[index]] = list(page)
            if entry.samples:
                sampled.append(value % 97)
        return sampled

    def last(self, table: array[int], opened: tuple[int, ...], start: int) -> int:
        """The slot before a row, which depends on all before it."""
        if start == 0:
            return 0
        index, offset = divmod(start - 1, SIZE)
        if opened and start % SIZE:
            return self.pages[opened[0]][offset]
        return self.blocks[table[index]][offset]


class SlowDisk:
    """A disk that holds some blocks and delivers them some steps later, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self.files: dict[bytes, bytes] = {}
        self.unfinished: list[ReadJob] = []
        self._chance = chance

    def __contains__(self, content: bytes) -> bool:
        return content in self.files

    def read(self, hashes: list[bytes], sequence: Sequence) -> ReadJob:
        self.unfinished.append(ReadJob(hashes, sequence))
        return self.unfinished[-1]

    def take_read(self) -> list[ReadJob]:
        done = [job for job in self.unfinished if self._chance.random() < 0.3]
        for job in done:
            self.unfinished.remove(job)
            for content in job.hashes:
                if self._chance.random() < 0.1:  # damaged
                    del self.files[content]
                if content not in self.files:
                    break
                job.found.append((content, bytearray(self.files[content])))
            seen["read"] += len(job.found)
        return done


class Simulation:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.sealed = chance.random() < 0.4
        limits = SchedulerLimits(chance.choice([2, 4, 6]), chance.choice([6, 12]), 60)
        num_open = num_open_pages(limits.max_num_seqs, limits.max_num_batched_tokens, SIZE)
        self.blocks = BlockManager(
            chance.choice([16, 20, 28]),
            SIZE,
            prefix_caching=chance.random() < 0.8,
            num_open=num_open if self.sealed else 0,
        )
        self.caching = self.blocks._prefix_caching
        self.memory = Memory(self.sealed)
        self.disk = SlowDisk(chance) if self.caching and chance.random() < 0.7 else None
        rates = Rates(prefill=1.0, moves=chance.choice([1e9, 1e9, 1.0]))
        sizes = TierSizes(16, 16, 16 * chance.choice([0, 5, 40]), chance.random() < 0.3)
        self.tiers = Tiers(self.blocks, sizes, rates, self.disk)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.blocks, limits, tiers=self.tiers)
        self.answers: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def run(self, steps: int) -> None:
        for step in range(steps):
            if self.chance.random() < 0.3:
                self.submit(step)
            self.step(step)
        step = steps
        while self.scheduler.has_work:
            self.step(step)
            step += 1
            assert step < steps + 3000, "no end in sight"
        for name, request in self.requests.items():
            expected = right_answer(request)
            got = self.answers.get(name, [])
            assert got == (expected[: len(got)] if name in self.aborted else expected)
        assert self.tiers.host.room == self.tiers.host.capacity - sum(
            len(job.hashes) for job in (self.disk.unfinished if self.disk else ())
        )
        counters = self.tiers.counters
        seen["swaps"] += counters.swaps
        seen["back"] += counters.swapped_in
        seen["from host"] += counters.host_hits
        seen["from disk"] += counters.disk_hits

    def submit(self, step: int) -> None:
        name, chance = str(step), self.chance
        start = chance.choice([0, 100, 200])
        shared = list(range(start, start + chance.randrange(24)))
        own = [chance.randrange(50) for _ in range(1 + chance.randrange(6))]
        sampling = SamplingParams(max_tokens=1 + chance.randrange(24), ignore_eos=True)
        request = Request(request_id=name, prompt_token_ids=tuple(shared + own), sampling=sampling)
        self.scheduler.add(request, float(step))
        self.requests[name] = request

    def step(self, step: int) -> None:
        if self.requests and self.chance.random() < 0.03:
            name = self.chance.choice(list(self.requests))
            if self.scheduler.abort(name):
                self.aborted.add(name)
        plan = self.scheduler.plan(float(step))
        self.scheduler.check_invariants()
        if plan is None:
            return
        saved = self.memory.save(plan.saves)
        if self.chance.random() < 0.03:
            if self.chance.random() < 0.5:
                self.tiers.hold(saved)
                self.memory.run(plan, saved)  # all of it was done, and then it failed
            self.scheduler.discard_plans()
            seen["failed"] += 1
        else:
            self.tiers.hold(saved)
            if self.chance.random() < 0.03:
                victim = self.chance.choice(plan.scheduled).sequence
                name = victim.request.request_id
                if victim.status is not SequenceStatus.FINISHED and self.scheduler.abort(name):
                    self.aborted.add(name)
            for update in self.scheduler.commit(plan, self.memory.run(plan, saved)):
                name = update.sequence.request.request_id
                self.answers.setdefault(name, []).append(update.token_id)
            self.write_some(plan)
        self.scheduler.check_invariants()

    def write_some(self, plan: Plan) -> None:
        """Full blocks that the cache knows go to the disk now and then."""
        if self.disk is None or self.chance.random() < 0.5:
            return
        for entry in plan.scheduled:
            for content in entry.sequence.block_hashes:
                block = self.blocks.index.get(content)
                if block is not None and content not in self.disk:
                    self.disk.files[content] = self.memory.read(block)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_answers_do_not_depend_on_where_blocks_have_been(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_module, "MIN_READ_TOKENS", SIZE)
    for seed in range(first, first + 20):
        try:
            Simulation(seed).run(60)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_all_that_matters_came_up() -> None:
    wanted = ("swaps", "back", "from host", "from disk", "read", "failed")
    assert not [name for name in wanted if seen[name] < 10], seen
