"""Files as Ollama's own converter writes them: its keys and tensors, and vision in the same file.

The keys are those of ollama/ollama's convert/*.go. Logits are transformers', with the settings of
the makers' config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.gguf_files import write_gguf_file
from support.gguf.gguf_models import gguf_tensors
from support.models.teacher_forcing import logits_of

from appliance.errors import UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZES = {"head_dim": 16, "hidden_size": 96, "num_hidden_layers": 3}
OTHERS = {
    "v.blk.0.attn_q.weight": torch.ones(4, 4),
    "v.patch_embd.weight": torch.ones(4, 3, 2, 2),
    "mm.mm_input_projection.weight": torch.ones(4, 4),
    "a.blk.0.ln1.weight": torch.ones(4),
}
NOTE = "text only: 4 tensors of other parts, such as vision, are left out"
VISION = {
    "vision.block_count": 1,
    "vision.embedding_length": 4,
    "vision.attention.head_count": 2,
    "vision.attention.layer_norm_epsilon": 1e-6,
    "vision.image_mean": [0.5, 0.5, 0.5],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 16.0,
    "beta_slow": 1.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
STRETCHED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]

# model_type and settings of transformers; Ollama's architecture and settings
Case = tuple[str, dict[str, Any], str, dict[str, Any]]
GEMMA3: dict[str, Any] = {"sliding_window": 7, "query_pre_attn_scalar": 16}
CASES: dict[str, Case] = {
    "gemma3": (
        "gemma3_text",
        GEMMA3 | {"layer_types": KINDS, "rope_parameters": STRETCHED, "rms_norm_eps": 1e-6},
        "gemma3",
        VISION
        | {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, True, False]}
        | {"context_length": 131072, "mm.tokens_per_image": 256},
    ),
    "gemma3-early": (
        "gemma3_text",
        GEMMA3
        | {"rms_norm_eps": 1e-6, "num_hidden_layers": 26, "max_position_embeddings": 64}
        | {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 70000.0},
        }},
        "gemma3",
        {"attention.sliding_window": 7, "final_logit_softcapping": 3.0}
        | {"rope.global.freq_base": 70000.0, "rope.local.freq_base": 5000.0},
    ),
    "mistral3": (
        "ministral3",
        {"sliding_window": None, "rope_parameters": YARN, "rms_norm_eps": 1e-6},
        "mistral3",
        VISION
        | {"rope.freq_base": 1000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.beta_fast": 16.0, "rope.scaling.beta_slow": 1.5}
        | {"rope.scaling.mscale": 1.0, "rope.scaling.mscale_all_dim": 1.0}
        | {"rope.scaling.original_context_length": 16, "rope.scaling_beta": 0.1}
        | {"image_token_index": 10, "spatial_merge_size": 2, "mm.projector_bias": False}
        | {"rope.dimension_count": 16, "attention.layer_norm_rms_epsilon": 1e-6}
        | {"mm.projector_hidden_act": "gelu"},
    ),
    "qwen25vl": (
        "qwen2",
        {"rms_norm_eps": 1e-6},
        "qwen25vl",
        VISION | {"rope.mrope_section": [2, 3, 3], "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "llama": (
        "llama",
        {"rms_norm_eps": 1e-5},
        "llama",
        {"attention.head_dim": 16, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 97},
    ),
}  # fmt: skip


def write(path: Path, model: Any, architecture: str, settings: dict[str, Any]) -> Path:
    config = model.config
    sizes: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    if "attention.head_dim" in settings:
        del sizes["attention.key_length"]
    known = "llama" if architecture == "mistral3" else architecture  # rows in pairs
    tensors: dict[str, Tensor] = gguf_tensors(model, known)
    return write_gguf_file(path, architecture, sizes | settings, tensors | OTHERS)


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_a_file_is_served_and_other_parts_are_named(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model_type, changes, architecture, settings = CASES[case]
    model = make_model(model_type, **SIZES | changes)
    source = open_model(write(tmp_path / "sha256-0", model, architecture, settings))
    assert NOTE in source.weights.notes()
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids[:40]])).logits[0]
    decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
    found = logits_of(decoder, token_ids[:40])
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)


def test_settings_that_change_the_text_are_still_refused(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model("qwen2", **SIZES)
    settings = CASES["qwen25vl"][3] | {"norm_top_k_prob": False}
    with pytest.raises(UnsupportedModelError, match="norm_top_k_prob = False"):
        open_model(write(tmp_path / "m.gguf", model, "qwen25vl", settings))
