from __future__ import annotations

import math

import pytest
import torch
from support.engine.plain_sampler import uniform_number

from appliance.engine.nouns.plan import Sampled, ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams, ThoughtBudget
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.sampler import Sampler, SampleTokens
from appliance.engine.run.staging import Staging, StepShape
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.penalties.cpu import penalize
from appliance.kernels.sampling import batched
from appliance.kernels.sampling.cpu import NativeSampling

EOS = 7
VOCAB = 50


def sequence(prompt: tuple[int, ...] = (1, 2), answer: tuple[int, ...] = (), **sampling: object):  # type: ignore[no-untyped-def]
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "seed": 5, **sampling}),  # type: ignore[arg-type]
    )
    return Sequence(request, token_ids=[*prompt, *answer])


CHOOSERS: dict[str, SampleTokens] = {
    "torch": batched.choose,
    "cpu-library": NativeSampling(NativeEngine(load_library(), threads=2)),
}


@pytest.fixture(params=CHOOSERS)
def choose(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    def choose(logits: list[float] | torch.Tensor, *sequences: Sequence) -> list[Sampled]:
        """Choose a token of each sequence, whose last token has just been read."""
        count = len(sequences)
        rows = torch.as_tensor(logits, dtype=torch.float32).reshape(len(sequences), -1).clone()
        device, shape = HostDevice(), StepShape(count, count, count, count)
        sampler = Sampler(
            (EOS,),
            CHOOSERS[request.param],
            penalize,
            device,
            num_slots=len(sequences),
            vocab_size=VOCAB,
        )
        entries = []
        for slot, one in enumerate(sequences, 1):
            one.slot = slot
            entries.append(ScheduledSequence(one, len(one.token_ids) - 1, 1, samples=True))
        staging = Staging(device, shape)
        settings = sampler.stage(entries, staging.arrays(shape))
        read = torch.tensor([one.token_ids[-1] for one in sequences])
        tensors, latest = staging.send(shape), staging.latest
        return sampler.launch(rows, entries, settings, tensors, latest, read=read).read()

    return choose


def peaked(*peaks: tuple[int, float]) -> list[float]:
    logits = [0.0] * VOCAB
    for token_id, value in peaks:
        logits[token_id] = value
    return logits


def test_greedy_takes_the_likeliest(choose) -> None:  # type: ignore[no-untyped-def]
    assert choose(peaked((3, 2.0)), sequence())[0].token_id == 3


def test_repetition_penalty_counts_prompt_and_answer_and_knows_the_sign(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((1, 2.0), (9, 1.9))
    assert choose(logits, sequence(prompt=(1,), repetition_penalty=1.2))[0].token_id == 9
    negative = [-1.0] * VOCAB
    assert choose(negative, sequence(prompt=(0,), repetition_penalty=2.0))[0].token_id == 1


def test_presence_and_frequency_count_the_answer_only(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((1, 2.0), (9, 1.0))
    assert choose(logits, sequence(prompt=(1,), presence_penalty=2.0))[0].token_id == 1
    assert choose(logits, sequence(answer=(1,), presence_penalty=2.0))[0].token_id == 9
    once = choose(logits, sequence(answer=(1,), frequency_penalty=0.6))[0]
    twice = choose(logits, sequence(answer=(1, 1), frequency_penalty=0.6))[0]
    assert (once.token_id, twice.token_id) == (1, 9)


@pytest.mark.parametrize("window", [1, 3, 5, 99])
def test_a_window_of_penalties_is_transformers_on_the_last_tokens(choose, window: int) -> None:  # type: ignore[no-untyped-def]
    from transformers import RepetitionPenaltyLogitsProcessor

    penalize_last = RepetitionPenaltyLogitsProcessor(1.7)
    generator = torch.Generator().manual_seed(window)
    for _ in range(8):
        logits = torch.randn(VOCAB, generator=generator)
        ids = torch.randint(0, VOCAB, (7,), generator=generator).tolist()
        wanted = penalize_last(torch.tensor([ids[-window:]]), logits[None].clone())
        one = sequence(
            tuple(ids[:4]), tuple(ids[4:]), repetition_penalty=1.7, penalty_window=window
        )
        assert choose(logits, one)[0].token_id == int(wanted.argmax())


def test_logit_bias_moves_one_token(choose) -> None:  # type: ignore[no-untyped-def]
    assert choose(peaked((3, 2.0)), sequence(logit_bias={4: 3.0}))[0].token_id == 4


def test_min_tokens_bans_every_way_to_stop(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((EOS, 5.0), (8, 4.0), (9, 3.0))
    early = sequence(min_tokens=1, stop_token_ids=(8,))
    late = sequence(answer=(3,), min_tokens=1, stop_token_ids=(8,))
    assert choose(logits, early)[0].token_id == 9
    assert choose(logits, late)[0].token_id == EOS


def test_logprobs_are_of_the_untouched_distribution(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((3, 2.0), (4, 1.0))
    result = choose(logits, sequence(logprobs=2, logit_bias={4: 5.0}))[0]
    expected = torch.log_softmax(torch.tensor(logits), 0)
    assert result.token_id == 4
    assert result.logprobs is not None
    assert result.logprobs.chosen.logprob == pytest.approx(expected[4].item())
    assert [candidate.token_id for candidate in result.logprobs.top] == [3, 4]


def test_a_thought_that_takes_too_long_is_ended(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((3, 2.0), (4, 1.0))

    def after(*answer: int, opening: tuple[int, ...] = (8,)) -> int:
        budget = ThoughtBudget(tokens=3, opening=opening, closing=(6, 7))
        token_id: int = choose(logits, sequence(answer=answer, thought_budget=budget))[0].token_id
        return token_id

    assert after(8, 1) == 3
    assert after(8, 1, 1) == 6
    assert after(8, 1, 1, 6) == 7
    assert after(8, 1, 1, 6, 7) == 3, "that is all"
    assert after(1, 1, 1) == 3, "no thought has begun"
    assert after(1, 1, 1, opening=()) == 6, "the prompt began it"
    assert after(6, 7, 1, opening=()) == 3, "it has ended by itself"


def test_a_broken_row_ends_that_sequence_alone(choose) -> None:  # type: ignore[no-untyped-def]
    rows = torch.tensor([peaked((3, 2.0)), [math.nan] * VOCAB, peaked((5, 1.0))])
    good, bad, other = choose(rows, sequence(), sequence(), sequence())
    assert (good.token_id, other.token_id) == (3, 5)
    assert bad.error is not None
    assert "finite" in bad.error


def test_one_nan_among_numbers_is_broken_too(choose) -> None:  # type: ignore[no-untyped-def]
    logits = peaked((3, 2.0))
    logits[40] = math.nan
    assert choose(logits, sequence())[0].error is not None


def test_seeded_choice_ignores_the_batch_and_varies_with_everything_else(choose) -> None:  # type: ignore[no-untyped-def]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    seeded = sequence(temperature=1.0)
    alone = choose(logits, seeded)[0].token_id
    crowd = [sequence(temperature=0.5, top_p=0.5), seeded, sequence()]
    assert choose(logits.expand(3, -1), *crowd)[1].token_id == alone
    numbers = {uniform_number(s, i, p) for s in range(10) for i in range(8) for p in range(50)}
    assert len(numbers) == 10 * 8 * 50
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
    assert uniform_number(-(2**63), 0, 0) >= 0
