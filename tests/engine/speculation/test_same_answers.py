"""Drafts of any kind change no answer, to the last bit: models, formats, sampling, company."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from grammar_words import EOS, words
from recurrent_models import RECURRENT
from replaying import Answers, ReplayingSpeculator
from sure_models import write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.loading import load_parts
from appliance.engine.messages import Vocabulary
from appliance.engine.request import Request, SamplingParams, ThoughtBudget
from appliance.grammar import Grammar

if TYPE_CHECKING:
    from pathlib import Path

NAMES = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"given_name": {"type": "string", "maxLength": 9}},
        "required": ["given_name"],
        "additionalProperties": False,
    }
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "several": {"temperature": 0.9, "seed": 4, "n": 3},
    "narrow": {"temperature": 1.2, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "reported": {"temperature": 1.0, "seed": 6, "logprobs": 3},
    "repetition": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "logprobs": 0},
    "counted": {
        "temperature": 1.0,
        "seed": 8,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {17: 4.0, 30: -50.0},
    },
    "long": {"temperature": 1.0, "seed": 9, "min_tokens": 30, "stop_token_ids": tuple(range(250))},
    "stopped": {"temperature": 1.0, "seed": 10, "stop_token_ids": tuple(range(300, 330))},
    "grammar": {"temperature": 1.0, "seed": 11, "grammar": NAMES, "logprobs": 1},
    "thought": {
        "temperature": 1.0,
        "seed": 12,
        "thought_budget": ThoughtBudget(20, (), (40, 41, 42)),
    },
    "beams": {"use_beam_search": True, "n": 2, "temperature": 0.0},
}


def requests_of(vocab_size: int) -> list[Request]:
    prompt = random.Random(1)
    shared = [prompt.randrange(3, vocab_size) for _ in range(21)]
    found = []
    for name, sampling in SAMPLINGS.items():
        own = [prompt.randrange(3, vocab_size) for _ in range(prompt.randrange(2, 30))]
        params = SamplingParams(**{"max_tokens": 45, **sampling})
        tokens = tuple(shared + own)
        found.append(Request(request_id=name, prompt_token_ids=tokens, sampling=params))
    return found


def load(folder: Path, **options: Any) -> LLMEngine:
    usual = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 160}
    config = EngineConfig(**{"model": str(folder), "speculate": "off", **usual, **options})
    engine = LLMEngine(*load_parts(config, (EOS,), None, lambda *_: None, None))
    known = words()
    engine.set_vocabulary(Vocabulary(known.tokens, known.special, in_order=True))
    return engine


def run(engine: LLMEngine, requests: list[Request]) -> tuple[Answers, int]:
    """Everything that clients are told of each answer, and the steps that they took."""
    found: Answers = {}
    for one in requests:
        engine.submit(one)
    before = engine.stats().steps_total
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            tokens, reports, _ = found.get((delta.request_id, delta.index), ([], [], None))
            reports = [*reports, *(delta.logprobs or ())]
            tokens = [*tokens, *delta.token_ids]
            found[delta.request_id, delta.index] = (tokens, reports, delta.finish_reason)
        engine._scheduler.check_invariants()
    engine.close()
    return found, engine.stats().steps_total - before


def compare(folder: Path, requests: list[Request], share: float, **options: Any) -> LLMEngine:
    """Assert that answers are the same with drafts, of which about a share is right."""
    expected, steps = run(load(folder, **options), requests)
    engine = load(folder, **options)
    engine._scheduler._speculator = ReplayingSpeculator(
        expected, share, engine._grammars._matchers, random.Random(5)
    )
    found, fewer = run(engine, requests)
    assert found == expected
    stats = engine.stats()
    assert stats.accepted_tokens_total > 20
    assert stats.draft_tokens_total > stats.accepted_tokens_total
    assert sum(stats.accepted_tokens_by_place) == stats.accepted_tokens_total
    by_place = list(stats.accepted_tokens_by_place)
    assert by_place == sorted(by_place, reverse=True)
    assert fewer < steps
    return engine


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4", "int4-sealed", "k8v4"])
def test_answers_are_the_same_in_every_format(tiny_llama: Path, kv: str) -> None:
    compare(tiny_llama, requests_of(512), 0.8, kv_cache_dtype=kv)


@pytest.mark.parametrize("host", [0, 2**20])
def test_answers_are_the_same_where_they_have_to_make_room(tiny_llama: Path, host: int) -> None:
    engine = compare(
        tiny_llama,
        requests_of(512),
        0.6,
        max_num_seqs=3,
        kv_cache_memory=26000,
        kv_host_memory=host,
    )
    assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_answers_of_recurrent_models_are_the_same(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model_type, settings = RECURRENT[name]
    folder = tmp_path_factory.mktemp(name)
    write_sure_model(model_type, folder, **SIZES | settings)
    requests = [one for one in requests_of(97) if one.request_id in ("greedy", "seeded", "several")]
    engine = compare(folder, requests, 0.7, max_num_seqs=4)
    assert engine.stats().state_saves_total > 0


SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
