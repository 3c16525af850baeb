from __future__ import annotations

import numpy as np
import pytest
import torch

from appliance.engine.device.device import HostDevice
from appliance.engine.device.device_sampler import DeviceSampler, uniform_numbers
from appliance.engine.plan import ScheduledSequence
from appliance.engine.request import Request, SamplingParams
from appliance.engine.sampler import Sampled, Sampler, uniform_number
from appliance.engine.sequence import Sequence
from appliance.kernels.sampling import SamplingRows, batched

EOS, VOCAB = 7, 50


def entry(answer: tuple[int, ...] = (), **sampling: object) -> ScheduledSequence:
    request = Request(
        request_id="r",
        prompt_token_ids=(1, 2, 2),
        sampling=SamplingParams(**{"temperature": 0.0, "seed": 5, **sampling}),  # type: ignore[arg-type]
    )
    sequence = Sequence(request, token_ids=[1, 2, 2, *answer])
    length = len(sequence.token_ids)
    return ScheduledSequence(sequence, length - 1, 1, samples=True)


def rows_of(entries: list[ScheduledSequence]) -> SamplingRows:
    settings = [entry.sequence.request.sampling for entry in entries]
    return SamplingRows.of(
        [s.temperature for s in settings],
        [s.top_k for s in settings],
        [s.top_p for s in settings],
        [s.min_p for s in settings],
        uniform_numbers(entries).tolist(),
    )


def sample(logits: torch.Tensor, entries: list[ScheduledSequence]) -> list[Sampled]:
    sampler = DeviceSampler((EOS,), batched.choose_where_it_is, HostDevice())
    latest = torch.full((len(entries) + 1,), -9)
    results = sampler.launch(logits.clone(), entries, rows_of(entries), latest).read()
    assert latest.tolist() == [*(max(0, result.token_id) for result in results), -9]
    return results


ENTRIES = [
    entry(),
    entry(temperature=1.0),
    entry((3, 3, 9), temperature=0.7, repetition_penalty=1.4),
    entry((3, 3, 9), presence_penalty=1.0, frequency_penalty=0.7),
    entry((3,), repetition_penalty=0.5, presence_penalty=-2.0, logit_bias={2: 1.5, 3: -4.0}),
    entry(logit_bias={4: 9.0}, temperature=1.2, top_p=0.9),
    entry((3,), min_tokens=2, stop_token_ids=(8, 9), temperature=1.0),
    entry((3, 4), min_tokens=2, stop_token_ids=(8, 9), temperature=1.0),
    entry(logprobs=3, logit_bias={4: 9.0}),
    entry(logprobs=0, temperature=1.5, top_k=5),
]


def test_results_equal_those_of_the_synchronous_sampler() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(ENTRIES), VOCAB, generator=generator) * 3
        expected = Sampler((EOS,), batched.choose).sample(
            logits.clone(), [entry.sequence for entry in ENTRIES]
        )
        assert sample(logits, ENTRIES) == expected


def beam(width: int, answer: tuple[int, ...] = (), **sampling: object) -> ScheduledSequence:
    return entry(answer, best_of=width, use_beam_search=True, **sampling)


BEAMS = [
    beam(2),
    entry(temperature=1.0),
    beam(6, (3, 4), logprobs=4),
    beam(3, logit_bias={4: 9.0, 5: -100.0}, logprobs=0),
    beam(4, (3,), min_tokens=2, stop_token_ids=(8, 9)),
    beam(16, min_tokens=1, stop_token_ids=tuple(range(VOCAB - 9)), logprobs=2),  # 9 are left
    entry(logprobs=3),
]


@pytest.mark.parametrize("levels", [1000, 4, 1])
def test_what_may_follow_beams_equals_that_of_the_synchronous_sampler(levels: int) -> None:
    """With few levels of logits most tokens are equally likely, with one all are."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(levels, (len(BEAMS), VOCAB), generator=generator) * (8 / levels)
        expected = Sampler((EOS,), batched.choose).sample(
            logits.clone(), [entry.sequence for entry in BEAMS]
        )
        found = sample(logits, BEAMS)
        assert found == expected
        assert [result.continuations is not None for result in found] == [
            entry.sequence.request.sampling.use_beam_search for entry in BEAMS
        ]
        for one in (0, 2, 4):  # neighbours with more beams change nothing, not even among equals
            assert sample(logits[one : one + 1], [BEAMS[one]])[0] == found[one]


def test_of_equally_likely_continuations_the_lowest_token_comes_first() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20] = 1.0
    (result,) = sample(logits, [beam(2, logprobs=3)])
    assert result.continuations is not None
    assert [one.token_id for one in result.continuations.candidates] == [20, 0, 1, 2, 3]
    assert [one.token_id for one in result.continuations.top] == [20, 0, 1]


def test_broken_logits_of_a_beam_are_told() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = torch.nan
    fine, broken = sample(logits, [beam(2), beam(2)])
    assert fine.continuations is not None
    assert broken.broken
    assert broken.continuations is None


def test_a_broken_row_and_a_ban_of_everything_are_told_apart() -> None:
    banned = entry(logit_bias=dict.fromkeys(range(VOCAB), -100.0), min_tokens=1)
    everything = entry(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    logits = torch.zeros(5, VOCAB)
    logits[2, 3] = torch.nan
    logits[4] = torch.nan
    results = sample(logits, [banned, everything, entry(), entry(), everything])
    assert [result.error is None for result in results] == [True, False, False, True, False]
    assert [result.broken for result in results] == [False, False, True, False, True]
    assert "ban every token" in str(results[1].error)
    assert "finite" in str(results[2].error)


def test_uniform_numbers_are_those_of_one_at_a_time() -> None:
    entries = [
        ScheduledSequence(
            Sequence(
                Request(
                    request_id="r",
                    prompt_token_ids=(1,),
                    sampling=SamplingParams(seed=seed),
                ),
                index=index,
            ),
            start,
            1,
            samples=True,
        )
        for seed in (0, 1, 2**63 - 1, -(2**63), -1, 12345)
        for index in (0, 1, 7)
        for start in (0, 1, 99, 131071)
    ]
    expected = [
        uniform_number(e.sequence.request.sampling.seed or 0, e.sequence.index, e.end)
        for e in entries
    ]
    assert uniform_numbers(entries).tolist() == expected
    assert uniform_numbers([]).shape == (0,)


@pytest.mark.parametrize("presence", [0.3, -2.0])
def test_penalties_are_rounded_as_the_synchronous_ones_are(presence: float) -> None:
    asked = entry((3,) * 7, presence_penalty=presence, frequency_penalty=0.1)
    logits = torch.full((1, VOCAB), 0.1)
    value = np.float32(0.1) - np.float32(presence + 0.1 * 7)
    logits[0, 4] = float(value)  # a tie with token 3 once it is adjusted, to the last bit
    logits[0, [i for i in range(VOCAB) if i not in (3, 4)]] = -9.0
    assert sample(logits, [asked])[0].token_id == 3
