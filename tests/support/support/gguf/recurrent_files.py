"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import torch
from safetensors.torch import load_file
from support.gguf.gguf_files import known_name, write_gguf_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
}


def metadata(config: Any) -> dict[str, Any]:
    """Settings of a file, without the prefix of its architecture."""
    rope = config.rope_parameters
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(16 * rope.get("partial_rotary_factor", 1.0)),
    }
    found |= {key: getattr(config, name) for key, name in OF_EXPERTS.items() if name in config}
    if config.model_type.startswith("lfm2"):
        attends = [kind == "full_attention" for kind in config.layer_types]
        return found | {
            "attention.head_count_kv": [config.num_key_value_heads * on for on in attends],
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "shortconv.l_cache": config.conv_L_cache,
        }
    return found | {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


def tiled(tensor: Tensor, keys: int, width: int) -> Tensor:
    """Value heads in llama.cpp's order: the first of each key head, then the second of each."""
    heads = tensor.reshape(keys, -1, width, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def converted(name: str, tensor: Tensor, config: Any) -> Tensor:
    """A tensor as llama.cpp's converter writes it."""
    if config.model_type.startswith("lfm2"):
        return tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if "shared_expert_gate" in name:
        return tensor.squeeze(0)
    part = name.partition("linear_attn.")[2].removesuffix(".weight")
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    if part in ("in_proj_qkv", "conv1d"):
        before = 2 * keys * config.linear_key_head_dim
        values = tiled(tensor[before:], keys, width)
        return torch.cat((tensor[:before], values)).squeeze(1 if part == "conv1d" else ())
    if part == "in_proj_z":
        return tiled(tensor, keys, width)
    if part in ("in_proj_a", "in_proj_b", "dt_bias"):
        return tiled(tensor, keys, 1)
    if part == "A_log":
        return -tiled(tensor, keys, 1).exp()
    return tiled(tensor.T.contiguous(), keys, width).T if part == "out_proj" else tensor


def stored_name(name: str, architecture: str, num_layers: int) -> str:
    """The name in a file of a checkpoint's tensor."""
    # The converter renames these before it looks them up in the table.
    known = {
        "feed_forward.expert_bias": "feed_forward.expert_bias.bias",
        "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    }
    for ours, theirs in known.items():
        name = name.replace(ours, theirs)
    if ".experts.w" in name:
        name = name.removeprefix("model.")
    return known_name(name, architecture, num_layers)


def write_gguf(
    folder: Path, model: Any, architecture: str, *, quantize: str = "", **changes: Any
) -> Path:
    """Write a model to `model.gguf`, and as its class saves it into `original`."""
    model.save_pretrained(folder / "original", save_original_format=False)
    config, found = model.config, {}
    tensors = load_file(folder / "original/model.safetensors")
    of_dense = [name for name in tensors if name.endswith(("w1.weight", "mlp.gate_proj.weight"))]
    width = tensors[of_dense[0]].shape[0] if of_dense else 1
    for name, tensor in tensors.items():
        layer, is_stack, _ = name.partition("experts.gate_up_proj")
        parts = {name: tensor}
        if is_stack:
            halves = tensor.chunk(2, dim=1)
            both = zip(("gate_proj", "up_proj"), halves, strict=True)
            if "lfm2" in architecture:
                both = zip(("w1", "w3"), halves, strict=True)
            parts = {f"{layer}experts.{part}.weight": half for part, half in both}
        elif name.endswith("experts.down_proj"):
            part = "w2" if "lfm2" in architecture else "down_proj"
            parts = {f"{name.removesuffix('down_proj')}{part}.weight": tensor}
        for part, whole in parts.items():
            stored = stored_name(part, architecture, config.num_hidden_layers)
            found[stored] = converted(part, whole, config)

    def packed(name: str, data: Any) -> Any:
        fits = quantize and data.ndim > 1 and data.shape[-1] % 32 == 0
        return gguf.GGMLQuantizationType[quantize] if fits else None

    settings = {"feed_forward_length": width} | metadata(config) | changes
    return write_gguf_file(folder / "model.gguf", architecture, settings, found, packed)
