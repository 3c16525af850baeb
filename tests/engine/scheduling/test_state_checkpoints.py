"""Counts what a model with recurrent layers computes again, and the memory of its state slots."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from support.simulation.load_script import answer_of
from support.simulation.virtual_runner import Clock, VirtualRunner

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.nouns.limits import SchedulerLimits
from appliance.engine.nouns.plan import ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.policy import chunk_end, gets_checkpoint
from appliance.engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

SIZE = 4
LONG = 10_000


class Served:
    """A scheduler of a recurrent model with the virtual runner."""

    def __init__(
        self, *, checkpoints: int = 200, num_seqs: int = 4, rows: int = 64, caches: bool = True
    ) -> None:
        self.states = StateSlots(num_seqs, checkpoints)
        self.blocks = BlockManager(1000, SIZE, states=self.states, prefix_caching=caches)
        limits = SchedulerLimits(num_seqs, rows, LONG)
        self.scheduler = Scheduler(self.blocks, limits)
        self.runner = VirtualRunner(
            self.blocks,
            max_rows=rows,
            sealed=False,
            depth=0,
            noise=random.Random(0),
            clock=Clock(),
        )
        self.count = 0

    def ask(self, prompt: Sequences[int], *, n: int = 1, max_tokens: int = 9) -> Request:
        self.count += 1
        sampling = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            request_id=str(self.count), prompt_token_ids=tuple(prompt), sampling=sampling
        )
        self.scheduler.add(request, float(self.count))
        return request

    def step(self) -> list[int]:
        """Rows of each sequence in one step."""
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        self.runner.launch(plan)
        self.scheduler.commit(plan, self.runner.collect())
        self.scheduler.check_invariants()
        return [entry.num_tokens for entry in plan.scheduled]

    def rows(self) -> int:
        """Run until all requests are done; return how many rows that took."""
        count = 0
        while self.scheduler.has_work:
            count += sum(self.step())
        return count


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(48), k=count)


@pytest.mark.parametrize("max_tokens", [1, 3, 21])
def test_twenty_turns_compute_only_new_tokens_and_at_most_a_partial_block(max_tokens: int) -> None:
    served, told = Served(), tokens(0, 300)
    known = 0
    for turn in range(20):
        request = served.ask(told, max_tokens=max_tokens)
        # The last token of an answer is never run.
        needed = len(told) + max_tokens - 1 - known
        assert needed <= served.rows() < needed + SIZE
        answer = answer_of(request, 0, LONG)
        known = len(told) + len(answer) - 1
        told += answer + tokens(turn, 17)


def test_a_turn_whose_answer_was_rewritten_begins_where_its_prompt_ended() -> None:
    served, told = Served(), tokens(0, 301)
    served.ask(told)
    served.rows()
    served.ask([*told, *tokens(1, 50)], max_tokens=1)
    assert served.rows() < 50 + SIZE


def test_a_changed_tail_makes_a_long_prompt_compute_about_twice_as_much() -> None:
    prompt = tokens(0, 3000)
    with patch("appliance.engine.scheduling.policy.FIRST_DISTANCE", 16):
        for changed in (5, 30, 100, 700):
            served = Served()
            served.ask(prompt, max_tokens=1)
            served.rows()
            made = len(served.states.checkpoints)
            served.ask([*prompt[:-changed], *tokens(changed, changed)], max_tokens=1)
            assert served.rows() <= 2 * changed + 16 + SIZE
            assert made <= 11, "a long prompt has few checkpoints"


def test_the_third_prompt_goes_on_where_the_first_two_parted() -> None:
    served, shared = Served(), tokens(0, 202)
    for seed, needed in ((1, 602), (2, 602), (3, 402)):
        served.ask([*shared, *tokens(seed, 400)], max_tokens=1)
        rows = served.rows()
        assert rows <= needed + SIZE
    assert rows >= 400


def test_siblings_share_the_prompt_up_to_its_last_block() -> None:
    served = Served()
    served.ask(tokens(0, 203), n=4, max_tokens=5)
    assert served.rows() <= 203 + 3 * SIZE + 4 * 4


def test_without_free_slots_a_request_waits() -> None:
    served = Served(num_seqs=2)
    for seed in range(3):
        served.ask(tokens(seed, 10), max_tokens=30)
    assert len(served.step()) == 2
    stats = served.scheduler.stats()
    assert (stats.state_slots_used, stats.waiting) == (2, 1)
    served.rows()
    assert served.scheduler.stats().state_slots_used == 0


def test_a_cache_without_checkpoints_computes_all_again_in_whole_chunks() -> None:
    served = Served(checkpoints=0, rows=256)
    for _ in range(2):
        served.ask(tokens(0, 200), max_tokens=1)
        assert served.step() == [200]
    assert served.scheduler.stats().state_saves_total == 0


def test_a_checkpoint_goes_with_its_block_and_old_ones_go_first() -> None:
    served = Served(checkpoints=6)
    for seed in range(12):
        served.ask(tokens(seed, 41), max_tokens=1)
        served.rows()
    stats = served.scheduler.stats()
    assert stats.state_checkpoints_cached == 6
    assert stats.state_evictions_total == 6
    served.ask(tokens(11, 41), max_tokens=1)
    assert served.rows() <= SIZE
    served.ask(tokens(99, 3990), max_tokens=1)
    served.rows()
    for content in served.states.checkpoints:
        assert served.blocks.index.get(content) is not None


def test_of_old_checkpoints_those_go_first_that_others_follow() -> None:
    served = Served(checkpoints=8)
    first, second = tokens(1, 41), tokens(2, 41)
    served.ask(first, max_tokens=1)
    served.rows()
    served.ask(second, max_tokens=1)
    served.rows()
    served.ask([*second, *tokens(3, 20)], max_tokens=1)
    served.rows()
    for seed in range(10, 15):
        served.ask(tokens(seed, 41), max_tokens=1)
        served.rows()
    assert len(served.states.checkpoints) == 8
    served.ask(tokens(20, 41), max_tokens=1)
    served.rows()
    served.ask(first, max_tokens=1)
    assert served.rows() <= SIZE, "the oldest ends its chain, the second one does not"


def test_the_rule_cuts_prompts_at_block_boundaries_alone() -> None:
    sequence = Sequence(
        Request(request_id="a", prompt_token_ids=tuple(range(2000)), sampling=SamplingParams())
    )
    sequence.num_alike = 103
    ends = []
    start = 0
    while start < 2000:
        end = chunk_end(sequence, start, 2000, 16)
        entry = ScheduledSequence(sequence, start, end - start, samples=end == 2000)
        assert gets_checkpoint(entry, 16)
        ends.append(end)
        start = end
    assert ends == [96, 976, 1488, 1984, 2000]
