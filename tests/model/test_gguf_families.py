"""GGUF files of every family that has them, written here from small random models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from support.gguf.gguf_models import pairs_from_halves, write_gguf
from support.models.teacher_forcing import logits_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


CPU_DEVICE = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [2.0, 2.5, 3.5],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.6,
}
# GGUF architecture, model_type, settings of the model, metadata beyond what all files have
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {}, {}),
    "llama-bias": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "llama-llama3": ("llama", "llama", {"rope_parameters": LLAMA3}, {"rope.freq_base": 50.0}),
    "llama-linear": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}},
        {"rope.freq_base": 50.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen2-yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "rope.freq_base": 50.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 12},
        {"attention.key_length": 12, "attention.value_length": 12},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 3.0,
        },
        {
            "attention.key_length": 12,
            "attention.value_length": 12,
            "attention.sliding_window": 7,
            "rope.freq_base": 1e6,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": (
        "phi3",
        "phi3",
        {"sliding_window": 7},
        {"attention.sliding_window": 7, "rope.scaling.original_context_length": 128},
    ),
    "phi3-longrope-partial": (
        "phi3",
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        {
            "attention.sliding_window": 0,
            "rope.freq_base": 1000.0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(32)),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_reads_as_the_checkpoint_it_was_made_from(
    case: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
    tmp_path: Path,
) -> None:
    architecture, model_type, settings, metadata = CASES[case]
    model = make_model(model_type, **settings)
    source = open_model(write_gguf(tmp_path / "model.gguf", model, architecture, metadata))
    original = open_model(save(model))

    for slot in original.slots():
        theirs, ours = original.weights.load(slot.name), source.weights.load(slot.name)
        torch.testing.assert_close(ours, theirs, atol=2e-7, rtol=0)
    ours = logits_of(load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32), token_ids)
    with torch.inference_mode():
        theirs = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama-llama3", "gemma3", "phi3-longrope-partial"])
def test_transformers_understands_the_config_of_a_gguf_file(
    case: str, make_model: Callable[..., Any], token_ids: list[int], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, model_type, settings, metadata = CASES[case]
    model = make_model(model_type, **settings)
    source = open_model(write_gguf(tmp_path / "model.gguf", model, architecture, metadata))
    config = AutoConfig.for_model(**source.config | {"pad_token_id": 0})
    assert config.architectures == [type(model).__name__]
    assert config.eos_token_id == 2

    rebuilt = AutoModelForCausalLM.from_config(config).eval()
    rebuilt.load_state_dict(
        {s.name: source.weights.load(s.name) for s in source.slots()}, strict=False
    )
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(tokens).logits, model(tokens).logits, atol=1e-4, rtol=0)


def test_packed_rows_are_put_back_without_loss(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    model = make_model("llama", **sizes)
    path = write_gguf(tmp_path / "model.gguf", model, "llama", {}, quantize=True)
    weights = open_model(path).weights
    for part, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", None), ("o_proj", None)):
        name = f"model.layers.1.self_attn.{part}.weight"
        stored = model.state_dict()[name]
        if heads is not None:
            stored = pairs_from_halves(stored, heads)
        kind = gguf.GGMLQuantizationType.Q4_1
        rows = gguf.quants.dequantize(gguf.quants.quantize(stored.numpy(), kind), kind)
        expected = torch.from_numpy(rows)
        ours = weights.load(name)
        assert isinstance(ours, PackedWeight)
        if heads is not None:
            expected = expected.view(heads, -1, 2, 64).swapaxes(1, 2).reshape(expected.shape)
        assert torch.equal(ours.dequantize(), expected)


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"expert_count": 8}, CheckpointError, "expert_used_count is missing"),
        ({"rope.dimension_count": 4}, UnsupportedModelError, "partial_rotary_factor"),
        ({"attention.value_length": 4}, UnsupportedModelError, "attention.value_length"),
        ({"attention.scale": 0.5}, UnsupportedModelError, "attention.scale"),
        ({"logit_scale": 0.5}, UnsupportedModelError, "logit_scale"),
        ({"block_count": 0}, CheckpointError, "block_count is 0"),
        ({"block_count": 4}, CheckpointError, r"blk\.3\.attn_norm.weight is missing"),
    ],
)
def test_metadata_that_changes_the_arithmetic_is_refused(
    metadata: dict[str, Any],
    error: type[Exception],
    named: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama", metadata)
    with pytest.raises(error, match=named):
        open_model(path)
