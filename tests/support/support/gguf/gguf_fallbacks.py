"""llama.cpp conversions of checkpoints that transformers' modules run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.gguf.gguf_conversions import gguf_settings
from support.gguf.gguf_files import known_name, write_gguf_file
from torch import Tensor

_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# Label, model_type and settings of each model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "gemma3n_text",
        _SIZES
        | {
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"]
            + ["sliding_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 7,
            "activation_sparsity_pattern": [0.95, 0.95, *[0.0] * 5],
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 32,
            "sliding_window": 7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        _SIZES
        | {
            "intermediate_size": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
            "mlp_multipliers": [0.8, 1.4],
        },
    ),
    "apertus": ("apertus", _SIZES | {"intermediate_size": 96, "max_position_embeddings": 16384}),
}


def write_file(
    path: Path,
    label: str,
    model: Any,
    packed: Any = None,
    extra: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a model's file with further tensors and changed settings; None leaves a setting out."""
    settings = gguf_settings(model.config) | _SETTINGS[label](model) | changes
    present = {key: value for key, value in settings.items() if value is not None}
    tensors = _TENSORS[label](model) | (extra or {})
    if model.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return write_gguf_file(path, label, present, tensors, packed or (lambda name, data: None))


def _gemma3n_settings(model: Any) -> dict[str, Any]:
    config = model.config
    quantiles = torch.distributions.Normal(0.0, 1.0).icdf(
        torch.tensor(config.activation_sparsity_pattern)
    )
    return {
        "activation_sparsity_scale": quantiles.tolist(),
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "attention.sliding_window_pattern": [k == "sliding_attention" for k in config.layer_types],
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
    }


def _gemma3n_tensors(model: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "altup_projections" not in name and "altup_unembed" not in name:
            known = f"{name}.weight" if name.endswith("_scale") else name
            found[known_name(known, "gemma3n", model.config.num_hidden_layers)] = tensor
    for stacked, modules in (
        ("altup_proj", model.model.altup_projections),
        ("altup_unembd_proj", model.model.altup_unembed_projections),
    ):
        found[f"{stacked}.weight"] = torch.stack([module.weight.data for module in modules])
    return found


def _falcon_h1_settings(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_d_ssm,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
        "embedding_scale": None,  # already included in the weights
    }


def _falcon_h1_tensors(model: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        known = name.replace("dt_bias", "dt_proj.bias")
        stored = known_name(known, "falcon-h1", model.config.num_hidden_layers)
        found[stored] = _falcon_h1_changed(name, tensor, model.config)
    return found


def _falcon_h1_changed(name: str, tensor: Tensor, config: Any) -> Tensor:
    part = name.split(".")[-2]
    factors: dict[str, float] = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if name.endswith("A_log"):
        return -tensor.exp().view(-1, 1)
    if name.endswith(".D"):
        return tensor.view(-1, 1)
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if name.endswith("mamba.norm.weight"):
        return tensor.view(config.mamba_n_groups, -1)
    if part == "in_proj":
        inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = [inner, inner, shared, shared, config.mamba_n_heads]
        each = zip(sizes, config.ssm_multipliers, strict=True)
        rows = torch.cat([torch.full((size, 1), float(factor)) for size, factor in each])
        factors["in_proj"] = config.ssm_in_multiplier
        tensor = tensor * rows
    return tensor * factors.get(part, 1.0)


def _apertus_settings(model: Any) -> dict[str, Any]:
    each = [layer.mlp.act_fn for layer in model.model.layers]
    return {
        f".xielu.{key}": [float(getattr(function, key).detach()) for function in each]
        for key in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _apertus_tensors(model: Any) -> dict[str, Tensor]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config
    found = {
        known_name(name, "apertus", config.num_hidden_layers): tensor
        for name, tensor in model.state_dict().items()
        if ".act_fn." not in name
    }
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    theta, width = config.rope_parameters["rope_theta"], config.head_dim
    plain = theta ** -(torch.arange(0, width, 2) / width)
    return found | {"rope_freqs.weight": plain / scaled}


_SETTINGS = {
    "gemma3n": _gemma3n_settings,
    "falcon-h1": _falcon_h1_settings,
    "apertus": _apertus_settings,
}
_TENSORS = {
    "gemma3n": _gemma3n_tensors,
    "falcon-h1": _falcon_h1_tensors,
    "apertus": _apertus_tensors,
}
