from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from support.engine import plain_sampler

from appliance.engine.nouns.plan import Sampled, ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.sampler import Sampler, SampleTokens
from appliance.engine.run.slot_settings import SlotSettings, uniform_numbers
from appliance.engine.run.staging import Staging, StepShape
from appliance.kernels.penalties.cpu import penalize
from appliance.kernels.sampling import batched

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


class ReadLater(HostDevice):
    """A device whose next step reads the tokens of this one."""

    is_asynchronous = True


def sampler_of(num_slots: int, choose: SampleTokens = batched.choose) -> Sampler:
    return Sampler(
        (EOS,),
        choose,
        penalize,
        ReadLater(),
        num_slots=num_slots,
        vocab_size=VOCAB,
    )


def sample(
    logits: torch.Tensor, entries: list[ScheduledSequence], sampler: Sampler | None = None
) -> list[Sampled]:
    """Sample as one step of a runner without graphs, with a padding row."""
    for slot, one in enumerate(entries, 1):
        one.sequence.slot = slot
    count = len(entries)
    sampler = sampler or sampler_of(count)
    shape = StepShape(count + 1, count + 1, count + 1, 1)
    staging = Staging(HostDevice(), shape)
    settings = sampler.stage(entries, staging.arrays(shape))
    tensors = staging.send(shape)
    latest = torch.full((count + 2,), -9)
    read = torch.tensor([*(one.sequence.token_ids[one.end - 1] for one in entries), 0])
    padded = torch.cat((logits, torch.zeros(1, VOCAB)))
    results = sampler.launch(padded, entries, settings, tensors, latest, read=read).read()
    assert latest.tolist() == [*(max(0, result.token_id) for result in results), 0, -9]
    return results


def plain(logits: torch.Tensor, entries: list[ScheduledSequence]) -> list[Sampled]:
    return plain_sampler.sample(logits, [one.sequence for one in entries], (EOS,))


def asked_of(one: ScheduledSequence) -> dict[str, object]:
    return msgspec.structs.asdict(one.sequence.request.sampling)


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


SHAPE = StepShape(len(ENTRIES) + 1, len(ENTRIES) + 1, len(ENTRIES) + 1, 1)


def test_results_equal_those_of_plain_python() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(ENTRIES), VOCAB, generator=generator) * 3
        expected = plain(logits, ENTRIES)
        assert sample(logits, ENTRIES) == expected


def test_what_a_graph_has_drawn_counts_unless_single_logits_are_adjusted() -> None:
    """Samples step after step; each token counts once."""
    sampler, staged = sampler_of(len(ENTRIES)), Staging(HostDevice(), SHAPE)
    entries = [entry(tuple(one.sequence.token_ids[3:]), **asked_of(one)) for one in ENTRIES]
    for slot, one in enumerate(entries, 1):
        one.sequence.slot = slot
    latest = torch.zeros(SHAPE.num_samples, dtype=torch.int64)
    for step in range(6):
        logits = torch.randn(
            SHAPE.num_samples, VOCAB, generator=torch.Generator().manual_seed(step)
        )
        expected = plain(logits[: len(entries)], entries)
        settings = sampler.stage(entries, staged.arrays(SHAPE))
        tensors = staged.send(SHAPE)
        assert tensors.penalties.counted.any() == (step > 0)
        read = torch.tensor([*(one.sequence.token_ids[-1] for one in entries), 0])
        drawn = sampler.choose(logits.clone(), read, tensors, latest)
        step_of = (logits, entries, settings, tensors, latest)
        found = sampler.launch(*step_of, read=read, drawn=drawn).read()
        assert found == expected
        for one, result in zip(entries, found, strict=True):
            one.sequence.token_ids.append(result.token_id)
        entries = [one._replace(start=one.start + 1) for one in entries]


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
def test_what_may_follow_beams_equals_that_of_plain_python(levels: int) -> None:
    """With few levels of logits most tokens are equally likely, with one level all are."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(levels, (len(BEAMS), VOCAB), generator=generator) * (8 / levels)
        expected = plain(logits, BEAMS)
        found = sample(logits, BEAMS)
        assert found == expected
        assert [result.continuations is not None for result in found] == [
            entry.sequence.request.sampling.use_beam_search for entry in BEAMS
        ]
        for one in (0, 2, 4):  # neighbours with more beams change nothing, not even ties
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
        plain_sampler.uniform_number(e.sequence.request.sampling.seed or 0, e.sequence.index, e.end)
        for e in entries
    ]
    for slot, one in enumerate(entries, 1):
        one.sequence.slot = slot
    keys = SlotSettings(len(entries)).of([one.sequence for one in entries]).rows["key"]
    ends = np.array([one.end for one in entries])
    assert uniform_numbers(keys, ends).tolist() == expected
    assert uniform_numbers(keys[:0], ends[:0]).shape == (0,)


@pytest.mark.parametrize("presence", [0.3, -2.0])
def test_penalties_are_rounded_as_in_plain_python(presence: float) -> None:
    asked = entry((3,) * 7, presence_penalty=presence, frequency_penalty=0.1)
    logits = torch.full((1, VOCAB), 0.1)
    value = np.float32(0.1) - np.float32(presence + 0.1 * 7)
    logits[0, 4] = float(value)  # a tie with token 3 after the adjustment, to the last bit
    logits[0, [i for i in range(VOCAB) if i not in (3, 4)]] = -9.0
    assert sample(logits, [asked])[0].token_id == 3
