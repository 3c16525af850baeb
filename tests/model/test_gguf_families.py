"""GGUF files of every family that has them, written here from small random models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from gguf_files import write_gguf_file
from teacher_forcing import logits_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

CPU_DEVICE = torch.device("cpu")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
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


def pairs_from_halves(rows: Tensor, num_heads: int) -> Tensor:
    """The order in which llama.cpp's converter writes the rows of query and key."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model: Any, architecture: str) -> dict[str, Tensor]:
    """A model's tensors under GGUF names, as a converter would write them."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name in OUTER_NAMES:
            tensors[OUTER_NAMES[name]] = tensor
        else:
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            names = GEMMA_NAMES if architecture == "gemma3" else LAYER_NAMES
            tensors[f"blk.{layer}.{names[part]}.{kind}"] = tensor
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(rope, config.head_dim)
    if rope.get("rope_type") == "longrope":
        tensors["rope_factors_short.weight"] = torch.tensor(rope["short_factor"])
        tensors["rope_factors_long.weight"] = torch.tensor(rope["long_factor"])
    return tensors


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """What Llama 3.1's scaling divides each frequency by."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        share = (turns - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return torch.tensor(divisors)


def write_gguf(
    path: Path, model: Any, architecture: str, metadata: dict[str, Any], quantize: bool = False
) -> Path:
    config = model.config
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **metadata,
    }
    tensors = gguf_tensors(model, architecture)
    kind = gguf.GGMLQuantizationType.Q4_1
    return write_gguf_file(
        path,
        architecture,
        settings,
        tensors,
        lambda name, data: kind if quantize and data.ndim == 2 else None,
        {"tokenizer.ggml.eos_token_id": 2},
    )


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
        ({"block_count": 4}, CheckpointError, r"layers\.3\.input_layernorm.weight is missing"),
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
