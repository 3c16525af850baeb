"""Requests of every kind, and an engine's answers to them, with drafts or without."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from support.engine.grammar_words import EOS, words

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.messages import Vocabulary
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams, ThoughtBudget
from appliance.grammar import Grammar

if TYPE_CHECKING:
    from pathlib import Path

    from support.engine.replaying import Answers

    from appliance.engine.run.device import Device

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


def load(folder: Path, device: Device | None = None, **options: Any) -> LLMEngine:
    usual = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 160}
    config = EngineConfig(**{"model": str(folder), "speculate": "off", **usual, **options})
    engine = load_llm_engine(config, (EOS,), None, lambda *_: None, device)
    known = words()
    engine.set_vocabulary(Vocabulary(known.tokens, known.special, in_order=True))
    return engine


def run(engine: LLMEngine, requests: list[Request]) -> tuple[Answers, int]:
    """Everything that clients are told of each answer, and the pieces it came in.

    The pieces depend on accepted drafts alone; the steps also on when a grammar is ready.
    """
    found: Answers = {}
    pieces = 0
    for one in requests:
        engine.submit(one)
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            pieces += 1
            tokens, reports, _ = found.get((delta.request_id, delta.index), ([], [], None))
            reports = [*reports, *(delta.logprobs or ())]
            tokens = [*tokens, *delta.token_ids]
            found[delta.request_id, delta.index] = (tokens, reports, delta.finish_reason)
        engine.check_invariants()
    engine.close()
    return found, pieces
