"""Models with experts, windows, sinks, growing queries or learned positions in the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.greedy_answers import by_transformers, run
from support.models.sure_models import TWO_LAYERS, write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.errors import ConfigError

TOKENS = 36
_seeded = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 97, (40 + 7 * i,), generator=_seeded).tolist() for i in range(4)]

# Queries grow every 32 positions.
MINISTRAL3 = {
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.5,
    },
}
MODELS = EXPERTS | CENTERED | {"ministral3": ("ministral3", MINISTRAL3)}


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_moe",
        "glm4_moe",
        "gpt_oss",
        "gemma4",
        "ministral3",
        "deepseek_v3",
        "mistral4",
        "opt",
        "opt-after",
        "falcon-new",
        "llama4",
        "step3p7",
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model, and transformers' answers."""
    model_type, settings = MODELS[request.param]
    folder, kinds = tmp_path_factory.mktemp(request.param), settings.get("layer_types", [1, 2])
    sizes = TWO_LAYERS | settings | {"num_hidden_layers": len(kinds)}
    if model_type == "falcon":
        del sizes["head_dim"]  # the model takes none
    made = write_sure_model(model_type, folder, **sizes)
    expected = [by_transformers(made, prompt, TOKENS) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 5
    return folder, expected


def load(folder: Path, **options: Any) -> LLMEngine:
    usual: dict[str, Any] = {
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "dtype": "float32",
    }
    return load_llm_engine(
        EngineConfig(**{"model": str(folder), "kv_cache_dtype": "fp32", **usual, **options}),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
    )


def test_answers_are_the_same_with_experts_in_host_memory(model: Any) -> None:
    folder, _ = model
    whole = load(folder, kernels="torch")
    if not whole.info.num_experts:
        with pytest.raises(ConfigError, match=f"{folder.name} has no experts; leave it out"):
            load(folder, kernels="torch", experts_on_cpu=1)
        return
    prompts = [[3 + (7 * i + j) % 90 for j in range(5 + 60 * i)] for i in (0, 1)]
    split = load(folder, kernels="torch", experts_on_cpu=1)
    assert run(split, prompts, TOKENS) == run(whole, prompts, TOKENS)
    assert split.info.weight_bytes < whole.info.weight_bytes
    assert "cpu library" in split.info.backend
    assert split.info.fingerprint != whole.info.fingerprint
    (note,) = (note for note in split.info.notes if "stay in host memory" in note)
    assert note.startswith("experts of 1 of ")
    assert "as --experts-on-cpu asks" in note


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy_answers_equal_transformers_preempted_and_with_a_cached_prefix(
    model: Any, kernels: str
) -> None:
    folder, expected = model
    roomy = load(folder, kernels=kernels)
    assert run(roomy, PROMPTS, TOKENS) == expected  # prompts longer than a step, beside each other
    hits = roomy.stats().prefix_hits_total
    assert run(roomy, PROMPTS[3:], TOKENS) == expected[3:]
    assert roomy.stats().prefix_hits_total > hits
    small = load(
        folder,
        kernels=kernels,
        kv_cache_memory=14 * (roomy.info.kv_bytes // roomy.info.num_blocks),
        prefix_caching=False,
        max_model_len=128,
    )
    assert run(small, PROMPTS, TOKENS) == expected
    assert small.stats().preemptions_total > 0


def test_kv_formats_that_do_not_hold_latents_are_refused_by_name(tmp_path: Path) -> None:
    """Latents are held where a block has elements; 8 bits of them answer nearly as 32."""
    model_type, settings = MODELS["deepseek_v3"]
    made = write_sure_model(model_type, tmp_path, **TWO_LAYERS | settings)
    expected = by_transformers(made, PROMPTS[0], 8)
    engine = load(tmp_path, kv_cache_dtype="int8")
    width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    assert engine.info.kv_bytes // engine.info.num_blocks == 2 * (16 * width + 64)  # two layers
    assert run(engine, PROMPTS[:1], 8)[0][:4] == expected[:4]
    with pytest.raises(ConfigError, match="layer 0 caches latents, which int4 blocks do not hold"):
        load(tmp_path, kv_cache_dtype="int4-rotated")
