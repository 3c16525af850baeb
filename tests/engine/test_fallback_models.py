"""Whole answers of models that transformers' modules execute equal transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.fallback_models import FALLBACKS
from support.models.greedy_answers import by_transformers, run
from support.models.sure_models import write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.load.memory_request import request_memory
from appliance.engine.served_model import open_served
from appliance.errors import ConfigError, MemoryPlanError

TOKENS = 36
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", params=["granite_swa-sinks", "stablelm"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model_type, settings = FALLBACKS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return write_sure_model(model_type, folder, **SIZES | settings), folder


def load(folder: Path, **options: Any) -> LLMEngine:
    usual: dict[str, Any] = {
        "model": str(folder),
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "dtype": "float32",
        "kv_cache_dtype": "fp32",
    }
    return load_llm_engine(
        EngineConfig(**usual | options),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
    )


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy_answers_equal_transformers_preempted_and_with_a_cached_prefix(
    model: Any, kernels: str
) -> None:
    made, folder = model
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (40 + 7 * i,), generator=generator).tolist() for i in range(4)]
    wanted = [by_transformers(made, prompt, TOKENS) for prompt in prompts]
    assert len({token for answer in wanted for token in answer}) > 3
    roomy = load(folder, kernels=kernels)
    assert run(roomy, prompts, TOKENS) == wanted  # prompts longer than a step, beside each other
    hits = roomy.stats().prefix_hits_total
    assert run(roomy, prompts[3:], TOKENS) == wanted[3:]
    assert roomy.stats().prefix_hits_total > hits
    small = load(
        folder,
        kernels=kernels,
        kv_cache_memory=14 * (roomy.info.kv_bytes // roomy.info.num_blocks),
        prefix_caching=False,
        max_model_len=128,
    )
    assert run(small, prompts, TOKENS) == wanted
    assert small.stats().preemptions_total > 0


def test_it_says_that_transformers_executes_the_model(model: Any) -> None:
    made, folder = model
    name = type(made).__name__
    info = load(folder).info
    assert info.architecture == f"{name} of transformers"
    assert info.backend.startswith("transformers on cpu library")
    assert any(note.startswith(f"transformers' modules execute {name}") for note in info.notes)
    assert info.num_parameters == made.num_parameters()
    counted = sum(parameter.nbytes for parameter in made.parameters())
    assert counted <= info.weight_bytes < 1.3 * counted + 65536


def test_weights_are_rounded_while_they_are_loaded_if_asked_for_and_it_says_so(model: Any) -> None:
    folder = model[1]
    dense, packed = load(folder, dtype="auto"), load(folder, dtype="auto", weight_bits=8)
    assert packed.info.weight_format == "8 bits (a scale per row)"
    assert packed.info.weight_bytes < 0.65 * dense.info.weight_bytes
    assert any("are rounded to 8 bits while" in note for note in packed.info.notes)
    assert packed.info.fingerprint != dense.info.fingerprint
    source = open_served(EngineConfig(model=str(folder), weight_bits=8))
    config = EngineConfig(model=str(folder), weight_bits=8, threads=1)
    execution, request = request_memory(config, source)
    assert execution.name == packed.info.backend
    assert packed.info.weight_bytes <= request.weight_bytes < 1.4 * packed.info.weight_bytes + 65536


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel 2 divides models of a family here"),
        ({"lora_dir": "adapters"}, "leave out --lora and --lora-dir"),
        ({"speculate": "draft=self"}, "--speculate draft=self needs the CPU library"),
    ],
)
def test_what_only_native_families_have_is_refused_by_name(
    model: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(model[1], **options)


def test_what_does_not_fit_is_refused_before_memory_is_taken(model: Any) -> None:
    with pytest.raises(MemoryPlanError, match="this does not fit"):
        load(model[1], kv_cache_memory=32 << 10)
