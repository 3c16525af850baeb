"""Writes models and adapters as GGUF files, as llama.cpp's converters do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from support.gguf.gguf_files import write_gguf_file

from appliance.model.adapters.targets import adapter_targets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.model.adapters.adapter import LowRank
    from appliance.model.source import ModelSource

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
    """The divisors of Llama 3.1's scaling, one for each frequency."""
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
    path: Path,
    model: Any,
    architecture: str,
    metadata: dict[str, Any],
    quantize: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
    ids: Mapping[str, int] | None = None,
) -> Path:
    """Write a model; `tensors` replace the converter's, `ids` add token ids."""
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
    kind = gguf.GGMLQuantizationType.Q4_1
    return write_gguf_file(
        path,
        architecture,
        settings,
        gguf_tensors(model, architecture) if tensors is None else tensors,
        lambda name, data: kind if quantize and data.ndim == 2 else None,
        {"tokenizer.ggml.eos_token_id": 2} | dict(ids or {}),
    )


def gguf_factors(source: ModelSource, parts: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """An adapter's factors under GGUF names; rows of B of queries and keys are permuted."""
    mapping = source.family.gguf
    assert mapping is not None
    assert mapping.interleaved_rope
    stored = adapter_targets(source.spec, mapping.names)
    tensors: dict[str, Tensor] = {}
    for name, module in zip(stored, adapter_targets(source.spec, source.family.names), strict=True):
        part = parts[module]
        heads = {"attn_q": "num_heads", "attn_k": "num_kv_heads"}.get(name.rpartition(".")[2])
        b = part.b
        if heads is not None:
            b = pairs_from_halves(b, getattr(source.spec.attention_layers[0], heads))
        tensors[f"{name}.weight.lora_a"], tensors[f"{name}.weight.lora_b"] = part.a, b
    return tensors


def write_gguf_adapter(path: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """Write factors as they are; `fields` replace the metadata."""
    writer = gguf.GGUFWriter(str(path), fields.get("architecture", "llama"))
    writer.add_type(fields.get("type", "adapter"))
    writer.add_string("adapter.type", fields.get("kind", "lora"))
    if "alpha" in fields:
        writer.add_float32("adapter.lora.alpha", fields["alpha"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
