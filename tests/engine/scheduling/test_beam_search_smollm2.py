"""Beam search over SmolLM2's first layers, dense, token for token as transformers finds it."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.gguf.gguf_files import first_layers
from support.gguf.transformers_gguf import load_with_transformers

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = ["The capital of Japan is", "Give three tips for staying healthy.\n\n1."]
ENDS = [".", " I", " one"]
SEARCHES: list[tuple[int, int, bool | str, float]] = [
    (2, 2, True, 1.0),
    (4, 2, False, 1.0),
    (6, 6, "never", 2.0),
]


def test_answers_are_those_of_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    model = load_with_transformers(first_layers(smollm2_gguf, tmp_path / "first.gguf", "llama", 4))
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    settings |= {"dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    weights = {name: one.contiguous() for name, one in model.model.named_parameters("model")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # Tokens that these layers often predict also end an answer, so that answers of several lengths
    # compete.
    liked = (tokenizer.encode(text, add_special_tokens=False) for text in ENDS)
    ends = (*tokenizer.eos_token_ids, *chain.from_iterable(liked))
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    searches = [(prompts[number % 2], search) for number, search in enumerate(SEARCHES)]
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", kv_cache_dtype="fp32", max_model_len=256, threads=2
    )
    engine = load_llm_engine(
        config, eos_token_ids=ends, metadata=None, on_progress=lambda stage, done, total: None
    )
    answers: dict[tuple[str, int], tuple[int, ...]] = {}
    for number, (prompt, search) in enumerate(searches):
        width, n, early_stopping, length_penalty = search
        sampling = SamplingParams(
            use_beam_search=True,
            n=n,
            best_of=width,
            early_stopping=early_stopping,  # type: ignore[arg-type]
            length_penalty=length_penalty,
            max_tokens=12,
        )
        engine.submit(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    while engine.has_work:
        for delta in engine.step().deltas:
            answers[delta.request_id, delta.index] = delta.token_ids
    assert len({*map(len, answers.values())}) > 2
    for number, (prompt, search) in enumerate(searches):
        width, n, early_stopping, length_penalty = search
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=n,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
        )
        for index, row in enumerate(found[:, len(prompt) :].tolist()):
            end = next((place for place, token in enumerate(row) if token in ends), len(row))
            assert answers[str(number), index] == tuple(row[: end + 1])
