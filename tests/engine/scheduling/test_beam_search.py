"""Beam search over a random model, token for token as transformers finds it in float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine.broken_logits import break_logits

from appliance.config import EngineConfig
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.sequence import Sequence

EOS = tuple(range(5, 512, 17))  # many, so that some answers end early


def load(folder: Path, **options: Any) -> LLMEngine:
    config = EngineConfig(
        **{
            "model": str(folder),
            "threads": 1,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "dtype": "float32",
            "kv_cache_dtype": "fp32",
            **options,
        }
    )
    return load_llm_engine(
        config, eos_token_ids=EOS, metadata=None, on_progress=lambda stage, done, total: None
    )


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> LLMEngine:
    return load(tiny_llama)


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 512, (length,), generator=generator).tolist())


def request(name: str, tokens: tuple[int, ...], width: int, **sampling: Any) -> Request:
    defaults = {"max_tokens": 20, "use_beam_search": True, "n": width}
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=SamplingParams(**{**defaults, **sampling}),
    )


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], SequenceDelta]:
    """Answers by request and place; the engine must be empty afterwards."""
    for item in requests:
        engine.submit(item)
    answers: dict[tuple[str, int], SequenceDelta] = {}
    while engine.has_work:
        engine.check_invariants()
        for delta in engine.step().deltas:
            assert (delta.request_id, delta.index) not in answers
            answers[delta.request_id, delta.index] = delta
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
    return answers


def expected(oracle: Any, item: Request) -> list[tuple[int, ...]]:
    """The answers of transformers, best first."""
    sampling = item.sampling
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([item.prompt_token_ids]),
            attention_mask=torch.ones(1, len(item.prompt_token_ids), dtype=torch.int64),
            num_beams=sampling.num_sequences,
            num_return_sequences=sampling.n,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            eos_token_id=None if sampling.ignore_eos else [*EOS, *sampling.stop_token_ids],
            pad_token_id=0,
            do_sample=False,
        )
    ends = set() if sampling.ignore_eos else {*EOS, *sampling.stop_token_ids}
    answers = []
    for row in found[:, len(item.prompt_token_ids) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        answers.append(tuple(row[: end + 1]))  # fills up the rows
    return answers


# Each pair of two settings once.
STOPPING, ENDS = [True, False, "never"], [(1.0, 24), (0.0, 24), (2.5, 40), (-1.0, 9)]
CASES = [
    ((2, 4, 6)[(place + at) % 3], stopping, end)
    for place, stopping in enumerate(STOPPING)
    for at, end in enumerate(ENDS)
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)))
def test_answers_are_those_of_transformers(
    engine: LLMEngine, oracle: Any, number: int, case: tuple[int, Any, tuple[float, int]]
) -> None:
    """Two searches run beside each other, over the prompts in turn."""
    width, early_stopping, (length_penalty, max_tokens) = case
    requests = [
        request(
            f"r{seed}",
            prompt(5 + 7 * seed, seed),
            width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=max_tokens,
        )
        for seed in ((0, 3), (1, 2))[number % 2]
    ]
    answers = run(engine, *requests)
    for item in requests:
        found = [answers[item.request_id, index].token_ids for index in range(width)]
        assert found == expected(oracle, item)


def test_bans_bias_and_stop_tokens_are_those_of_transformers(
    engine: LLMEngine, oracle: Any
) -> None:
    for seed in range(3):
        item = request(
            f"r{seed}", prompt(20, seed), 4, n=2, best_of=4, min_tokens=9, stop_token_ids=(8, 9)
        )
        answers = run(engine, item)
        found = [answers[item.request_id, index].token_ids for index in range(2)]
        assert found == expected(oracle, item)
    free = run(engine, request("free", prompt(20, 1), 3, ignore_eos=True, max_tokens=6))
    liked = free["free", 0].token_ids[0]
    banned = request("r", prompt(20, 1), 3, ignore_eos=True, logit_bias={liked: -100.0})
    assert all(liked not in answer.token_ids for answer in run(engine, banned).values())


def test_log_probabilities_are_reported_and_add_up(engine: LLMEngine, oracle: Any) -> None:
    item = request("r", prompt(30, 3), 3, logprobs=2, max_tokens=8, logit_bias={7: 1.0})
    for answer in run(engine, item).values():
        assert answer.logprobs is not None
        with torch.inference_mode():
            tokens = torch.tensor([[*item.prompt_token_ids, *answer.token_ids]])
            logprobs = oracle(tokens).logits[0].log_softmax(-1)
        for place, (token, said) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            there = logprobs[len(item.prompt_token_ids) + place - 1]
            assert said.chosen.token_id == token
            assert said.chosen.logprob == pytest.approx(there[token].item(), abs=1e-4)
            assert [one.token_id for one in said.top] == there.topk(2).indices.tolist()
        total = sum(one.chosen.logprob for one in answer.logprobs)
        assert answer.cumulative_logprob == pytest.approx(total)
    plain = run(engine, request("r", prompt(30, 3), 3))
    assert all(answer.logprobs is None for answer in plain.values())
    assert all(answer.cumulative_logprob for answer in plain.values())


def share_nothing(blocks: BlockManager, parent: Sequence, child: Sequence, num_tokens: int) -> None:
    child.block_hashes = []
    child.num_computed = 0


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_shared_blocks_change_memory_and_nothing_else(
    tiny_llama: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(f"r{seed}", prompt(150 + 3 * seed, seed), 4, max_tokens=20, ignore_eos=True)
        for seed in range(3)
    ]

    def search() -> tuple[dict[tuple[str, int], tuple[int, ...]], float]:
        """Return the answers, and the ratio of distinct blocks to all entries in block tables."""
        engine, answers, in_use, in_tables = load(tiny_llama, kv_cache_dtype=kv), {}, 0, 0
        for item in requests:
            engine.submit(item)
        while engine.has_work:
            for delta in engine.step().deltas:
                answers[delta.request_id, delta.index] = delta.token_ids
            in_use += engine.stats().blocks_active
            in_tables += sum(view.blocks for view in engine.sequences())
        return answers, in_use / in_tables

    shared, share = search()
    monkeypatch.setattr(BlockManager, "fork", share_nothing)
    alone, unshared = search()
    assert shared == alone
    assert share < 0.7
    assert unshared == 1.0


def test_preempted_searches_find_the_same(tiny_llama: Path) -> None:
    requests = [
        request(f"r{i}", prompt(30 + i, i), 4, max_tokens=60, ignore_eos=True) for i in range(4)
    ]
    small = load(tiny_llama, kv_cache_memory=22 * 16 * 2 * 2 * 2 * 16 * 4, prefix_caching=False)
    assert small.info.num_blocks == 22
    roomy = load(tiny_llama, prefix_caching=False)
    tight, free = (
        {key: (answer.token_ids, answer.cumulative_logprob) for key, answer in found.items()}
        for found in (run(small, *requests), run(roomy, *requests))
    )
    assert small.stats().preemptions_total > 0
    assert tight == free


def test_an_abort_ends_all_beams_in_every_phase(engine: LLMEngine) -> None:
    for steps in (0, 1, 2, 3, 9):  # queued, in prefill, at its end, just forked, in decode
        engine.submit(request("gone", prompt(100, steps), 4, max_tokens=50, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        assert engine.abort("gone", index=2 if steps == 3 else None)
        assert not engine.has_work
        assert (engine.stats().blocks_active, engine.stats().waiting) == (0, 0)


def test_a_failed_step_is_repeated(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    item = request("r", prompt(40, 8), 4, max_tokens=20, ignore_eos=True)
    answers = run(engine, item)
    engine.submit(item)
    found = {}
    for step in itertools.count():
        if step in (0, 2, 9):
            with monkeypatch.context() as patch:
                patch.setattr(engine.runner, "launch", lambda plan: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
        for delta in engine.step().deltas:
            found[delta.request_id, delta.index] = delta.token_ids
        engine.check_invariants()
        if not engine.has_work:
            break
    assert found == {key: answer.token_ids for key, answer in answers.items()}


def test_broken_logits_of_one_beam_end_its_request_and_no_other(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five rows: four beams, and the other request.
    break_logits(engine, monkeypatch, lambda call, rows: rows == 5)
    engine.submit(request("beams", prompt(10, 1), 4, ignore_eos=True))
    plain = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.submit(Request(request_id="other", prompt_token_ids=prompt(9, 2), sampling=plain))
    errors, counts = set(), {"beams": 0, "other": 0}
    while engine.has_work:
        for delta in engine.step().deltas:
            counts[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason is FinishReason.ERROR:
                errors.add(delta.request_id)
    assert errors == {"beams"}
    assert counts == {"beams": 0, "other": 9}
    assert engine.stats().blocks_active == 0


def test_searches_that_can_never_run_are_refused_with_the_numbers(tiny_llama: Path) -> None:
    engine = load(tiny_llama, max_num_seqs=4, kv_cache_memory=20 * 16 * 2 * 2 * 2 * 16 * 4)
    assert engine.info.num_blocks == 20
    with pytest.raises(
        RequestError, match="runs 5 sequences at once, and this engine runs at most 4"
    ):
        engine.submit(request("wide", prompt(5, 1), 5))
    smaller = load(tiny_llama, kv_cache_memory=17 * 16 * 2 * 2 * 2 * 16 * 4)
    with pytest.raises(RequestError, match=r"4 beams .* 250 tokens .* 19 .* there are 17"):
        smaller.submit(request("long", prompt(250, 1), 4))
    assert not engine.has_work
    # The prompt has 15 full blocks, and each beam one more with six slots left. The last token
    # needs no slot, but the context of 256 ends there too.
    found = run(engine, request("just", prompt(250, 1), 4, ignore_eos=True, max_tokens=None))
    assert [len(answer.token_ids) for answer in found.values()] == [6] * 4
    assert {answer.finish_reason for answer in found.values()} == {FinishReason.LENGTH}
