"""Drafts run where they pay, by counted rows on a machine whose costs are known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from appliance.engine.grammars.matchers import Matchers
from appliance.engine.nouns.plan import StepLoad
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.speculation.controller import Acceptance, Controller, RowCosts
from appliance.engine.speculation.proposal import Chance, Proposal
from appliance.engine.speculation.speculator import Speculator
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Ordered


@pytest.fixture
def _durations_follow_from_rows() -> None:
    """Here each step takes what its machine says."""


# Milliseconds of a step by rows, `scripts/bench/results/cpu/models.json`.
SMALL = {1: 2.31, 4: 4.35, 8: 8.45, 16: 15.5}
LARGE = {1: 12.4, 4: 16.0, 8: 21.7, 16: 35.3}


def cost_of(table: dict[int, float], rows: int) -> float:
    """Seconds of a step; beyond the table they grow as at its end."""
    known = sorted(table)
    high = next((one for one in known if one >= rows), known[-1])
    low = max((one for one in known if one < high), default=1)
    if low == high:
        return table[high] / 1000
    slope = (table[high] - table[low]) / (high - low)
    return (table[low] + slope * (rows - low)) / 1000


class Oracle:
    """Proposes tokens of which a known share is accepted."""

    def __init__(self, share: Callable[[int], float], noise: random.Random, support: int) -> None:
        self.share, self.noise, self.support = share, noise, support

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """A right token is 1; the model's next tokens are all 1."""
        found = {}
        for sequence, most in answers:
            share = self.share(sequence.num_output_tokens)
            tokens = tuple(int(self.noise.random() < share) for _ in range(most))
            found[sequence] = Proposal(tokens, "suffix", self.support)
        return found

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`."""


def sequence(**sampling: object) -> Sequence:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Sequence(Request(request_id="r", prompt_token_ids=(1,), sampling=params))


def tokens_per_second(
    table: dict[int, float],
    share: Callable[[int], float],
    batch: int,
    *,
    steps: int = 600,
    support: int = 3,
    on: bool = True,
) -> float:
    noise = random.Random(batch)
    matchers = Matchers(8, ())
    speculator = Speculator([Oracle(share, noise, support)], matchers, most=15)
    running = [sequence() for _ in range(batch)]
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        asked = [(one, 1, 15) for one in running]
        drafts = speculator.propose(asked, room=64) if on else {}
        rows = batch + sum(map(len, drafts.values()))
        taken = cost_of(table, rows) * noise.uniform(0.9, 1.3)
        for one in running:
            accepted = next((at for at, x in enumerate(drafts.get(one, ())) if x != 1), None)
            accepted = len(drafts.get(one, ())) if accepted is None else accepted
            one.token_ids += [1] * (1 + accepted)
            tokens += 1 + accepted
        speculator.observe(StepLoad(batch, 10, draft_rows=rows - batch), taken)
        seconds += taken
    return tokens / seconds


@pytest.mark.parametrize("table", [SMALL, LARGE], ids=["135M", "0.5B"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_what_comes_true_seldom_costs_nothing(table: dict[int, float], batch: int) -> None:
    for share in (0.0, 0.2):
        on = tokens_per_second(table, lambda _, share=share: share, batch)  # type: ignore[misc]
        off = tokens_per_second(table, lambda _: 0.0, batch, on=False)
        assert on >= 0.97 * off


def test_what_copies_is_faster_as_far_as_rows_allow() -> None:
    for table, least in ((SMALL, 1.6), (LARGE, 3.0)):
        on = tokens_per_second(table, lambda _: 0.97, 1, support=20)
        off = tokens_per_second(table, lambda _: 0.0, 1, on=False)
        assert on >= least * off


def test_a_part_that_copies_is_noticed_although_nothing_was_run_before() -> None:
    """Drafts that were rejected for long are tried again once they would be accepted."""

    def share(position: int) -> float:
        return 0.05 if position < 400 else 0.97

    on = tokens_per_second(LARGE, share, 1, steps=700)
    off = tokens_per_second(LARGE, lambda _: 0.0, 1, steps=700, on=False)
    assert on > 1.3 * off


def test_costs_follow_what_was_measured() -> None:
    costs = RowCosts()
    assert costs.seconds(3) == 0
    for _ in range(30):
        costs.observe(1, 0.002)
    assert 0.004 < costs.seconds(4) < 0.008, "a guess"
    costs.observe(4, 0.5)
    costs.observe(4, 0.003)
    costs.observe(0, 1.0)
    assert costs.seconds(4) == 0.003, "the first one was an outlier"
    assert 0.002 < costs.seconds(2) < 0.003 < costs.seconds(8)
    for _ in range(5000):
        costs.observe(1, 0.002)
    costs.observe(9, 0.02)
    assert costs.seconds(4) != 0.003, "so old that it says nothing"


def test_acceptance_is_learned_by_length_of_match_and_by_sequence() -> None:
    acceptance = Acceptance()
    good, bad = sequence(), sequence()
    for _ in range(60):
        for one, token in ((good, 1), (bad, 0)):
            acceptance.watch(one, Proposal((1, 1), "suffix", 3))
            one.token_ids += [token, token]
            acceptance.learn(one)
    likely = acceptance.expected(good, Proposal((1, 1, 1), "suffix", 3))
    assert likely[0] > 0.7
    assert likely == sorted(likely, reverse=True)
    assert not acceptance.expected(bad, Proposal((1, 1, 1), "suffix", 3))
    assert acceptance.expected(sequence(), Proposal((1,), "forced"))[0] > 0.9
    acceptance.end(bad)
    assert acceptance.expected(bad, Proposal((1,), "suffix", 3)), "it was forgotten"


def test_beams_are_refused_where_speculation_was_asked_for() -> None:
    beams = Request(
        request_id="b",
        prompt_token_ids=(1,),
        sampling=SamplingParams(use_beam_search=True, n=2, temperature=0.0),
    )
    Speculator([], Matchers(8, ()), 15).check(beams)
    asked = Speculator([], Matchers(8, ()), 15, asked_for="--speculate suffix")
    with pytest.raises(RequestError, match="--speculate suffix; leave use_beam_search out"):
        asked.check(beams)
    asked.check(sequence().request)


class SlowOracle:
    """A draft model: a round takes a known time, and a known share of its tokens is accepted."""

    def __init__(self, share: float, round_seconds: float, noise: random.Random) -> None:
        self.costs, self.read_seconds = RowCosts(), round_seconds / 8
        self.now, self.made = 0.0, 0
        self._share, self._seconds, self._noise = share, round_seconds, noise
        self._read: dict[Sequence, int] = {}

    def source(self, sequence: Sequence) -> str:
        return "draft"

    def unread(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - self._read.get(sequence, 0)

    def propose(
        self, answers: Ordered[tuple[Sequence, int]], chance: Chance, least: float
    ) -> dict[Sequence, Proposal]:
        """Continue a draft with the probabilities of a model: right tokens get higher ones."""
        found = {}
        rounds = 0
        for sequence, most in answers:
            self.now += self.read_seconds * self.unread(sequence)
            self._read[sequence] = len(sequence.token_ids)
            tokens, supports, survival = list[int](), list[int](), 1.0
            while len(tokens) < most and (not tokens or survival >= least):
                right = self._noise.random() < self._share
                tokens.append(int(right))
                supports.append(self._noise.randrange(60, 100) if right else 50)
                survival *= chance(sequence, "draft", supports[-1])
            found[sequence] = Proposal(tuple(tokens), "draft", supports=tuple(supports))
            rounds = max(rounds, len(tokens))
            self.made += len(tokens)
        self.now += rounds * self._seconds
        self.costs.observe(len(answers), self._seconds)
        return found

    def end(self, sequence: Sequence) -> None:
        """See `SlowProposer`."""


def with_a_draft_model(
    table: dict[int, float], share: float, batch: int, round_seconds: float, steps: int = 2000
) -> tuple[float, int]:
    """Tokens per second, and the number of drafted tokens."""
    noise = random.Random(batch)
    slow = SlowOracle(share, round_seconds, noise)
    speculator = Speculator([], Matchers(8, ()), most=15, slow=slow, clock=lambda: slow.now)
    running = [sequence() for _ in range(batch)]
    tokens = 0
    for _ in range(steps):
        begin = slow.now
        drafts = speculator.propose([(one, 1, 15) for one in running], room=64)
        rows = batch + sum(map(len, drafts.values()))
        slow.now += cost_of(table, rows) * noise.uniform(0.9, 1.3)
        for one in running:
            given = drafts.get(one, ())
            accepted = next((at for at, x in enumerate(given) if x != 1), len(given))
            one.token_ids += [1] * (1 + accepted)
            tokens += 1 + accepted
        speculator.observe(StepLoad(batch, 10, draft_rows=rows - batch), slow.now - begin)
    return tokens / slow.now, slow.made


@pytest.mark.parametrize("table", [SMALL, LARGE], ids=["135M", "0.5B"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_draft_model_that_is_wrong_is_hardly_asked(table: dict[int, float], batch: int) -> None:
    off = tokens_per_second(table, lambda _: 0.0, batch, steps=2000, on=False)
    on, made = with_a_draft_model(table, 0.05, batch, 0.3 * table[1] / 1000)
    assert on >= 0.97 * off
    assert made > 0, "it is tried"


def test_a_draft_model_that_is_right_is_asked_where_it_is_fast_enough() -> None:
    off = tokens_per_second(LARGE, lambda _: 0.0, 1, steps=2000, on=False)
    fast, _ = with_a_draft_model(LARGE, 0.9, 1, 0.1 * LARGE[1] / 1000)
    assert fast > 1.6 * off
    slow, _ = with_a_draft_model(LARGE, 0.9, 1, 1.2 * LARGE[1] / 1000)
    assert slow >= 0.97 * off


@pytest.mark.parametrize(("lost", "drafts"), [(0.0, 2), (0.9, 0)], ids=["nothing", "much"])
def test_a_device_that_would_wait_for_the_host_takes_only_drafts_that_bring_more(
    lost: float, drafts: int
) -> None:
    """Rows cost nothing on it; a step that was not planned ahead takes longer."""
    controller, one = Controller(), sequence()
    for rows in (1, 2, 3):
        load = StepLoad(1, 10, draft_rows=rows - 1)
        for _ in range(8):
            controller.observe(load, 0.01 * (1 + lost))
    for _ in range(8):
        controller.observe(StepLoad(1, 10), 0.01, is_ahead=True)
    proposal = Proposal((5, 6), "suffix", 5)
    assert sum(controller.choose({one: proposal}, 1, 1, room=8).values()) == drafts


def test_a_device_is_waited_for_if_the_token_after_the_next_one_is_foreseen() -> None:
    controller, one = Controller(), sequence()
    for _ in range(8):
        controller.observe(StepLoad(1, 10), 0.01, is_ahead=True)
        controller.observe(StepLoad(1, 10, draft_rows=1), 0.01)
    assert controller.awaits({one: Proposal((5, 6), "suffix", 20)}, 1, 1, room=8)
    assert not controller.awaits({one: Proposal((5,), "suffix", 20)}, 1, 1, room=8)
    assert not controller.awaits({one: Proposal((5, 6), "suffix", 20)}, 1, 1, room=0)
    assert not controller.awaits({}, 1, 1, room=8)


def test_drafts_that_hardly_pay_give_way_to_a_step_without_them_now_and_then() -> None:
    """Otherwise the controller would not notice that such steps have become faster."""
    controller, one = Controller(), sequence()
    controller.observe(StepLoad(1, 10, draft_rows=1), 0.0125)
    controller.observe(StepLoad(1, 10), 0.01)
    chosen: list[int] = []
    for _ in range(150):
        drafts = sum(controller.choose({one: Proposal((5,), "suffix", 5)}, 1, 1, room=8).values())
        chosen.append(drafts)
        # With a draft 1.5 tokens take 1.25 times as long as a plain step, and later twice as long.
        plain = 0.01 if len(chosen) < 30 else 0.006
        controller.observe(StepLoad(1, 10, draft_rows=drafts), 0.0125 if drafts else plain)
    assert 0 in chosen[:30]
    assert sum(chosen[:30]) > 26
    assert sum(chosen[-25:]) == 0


def test_drafts_that_pay_well_need_no_step_without_them() -> None:
    controller, one = Controller(), sequence()
    controller.observe(StepLoad(1, 10), 0.01)
    for _ in range(60):
        assert controller.choose({one: Proposal((5,), "suffix", 40)}, 1, 1, room=8) == {one: 1}
        controller.observe(StepLoad(1, 10, draft_rows=1), 0.011)
