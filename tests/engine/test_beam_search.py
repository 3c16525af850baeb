"""Beam search over a random model, token for token as transformers finds it in float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.messages import SequenceDelta

EOS = tuple(range(5, 512, 17))  # many, so that answers end early now and then


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
    return LLMEngine.load(
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
        engine._scheduler.check_invariants()
        for delta in engine.step().deltas:
            assert (delta.request_id, delta.index) not in answers
            answers[delta.request_id, delta.index] = delta
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
    return answers


def expected(oracle: Any, item: Request) -> list[tuple[int, ...]]:
    """What transformers finds, best first."""
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
        answers.append(tuple(row[: end + 1]))  # what follows fills up the rows
    return answers


CASES = list(
    itertools.product(
        [2, 4, 6], [True, False, "never"], [(1.0, 24), (0.0, 24), (2.5, 40), (-1.0, 9)]
    )
)


@pytest.mark.parametrize(("width", "early_stopping", "rest"), CASES)
def test_answers_are_those_of_transformers(
    engine: LLMEngine, oracle: Any, width: int, early_stopping: Any, rest: tuple[float, int]
) -> None:
    length_penalty, max_tokens = rest
    requests = [
        request(
            f"r{seed}",
            prompt(5 + 7 * seed, seed),
            width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=max_tokens,
        )
        for seed in range(4)
    ]
    answers = run(engine, *requests)
    for item in requests:
        found = [answers[item.request_id, index].token_ids for index in range(width)]
        assert found == expected(oracle, item)
