"""Settings, names and transforms that llama.cpp's converter gives a checkpoint, by family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from support.gguf.gguf_files import known_name
from torch import Tensor

ARCHITECTURES = {
    "qwen3_next": "qwen3next",
    "mistral4": "mistral4",
    "ministral3": "mistral3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "granite": "granite",
    "minicpm3": "minicpm3",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "gemma4_text": "gemma4",
    "falcon": "falcon",
    "llama": "llama",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4_moe": "bailingmoe2",  # the same tensors, but for fused heads
    "cohere": "command-r",
    "cohere2": "cohere2",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "arcee": "arcee",
    "exaone": "exaone",
    "olmoe": "olmoe",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "nemotron": "nemotron",
    "mixtral": "llama",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "llama4_text": "llama4",
}


def architecture_of(config: Any) -> str:
    """The architecture of a model's file; Granite 4 without recurrent layers keeps Granite 3's."""
    kind = config.model_type
    if kind == "granitemoehybrid" and set(config.layer_types) <= {"full_attention", "attention"}:
        return "granitemoe" if config.num_local_experts else "granite"
    return ARCHITECTURES[kind]


_SETTINGS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "moe_latent_size": "moe_latent_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SHARED = (
    "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip


def gguf_settings(whole: Any) -> dict[str, Any]:
    """Settings of a file, without the prefix of its architecture."""
    config = SimpleNamespace(**whole.to_dict())
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    found: dict[str, Any] = {
        "block_count": whole.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
    }
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    for key, name in _SETTINGS.items():
        if (value := getattr(config, name, None)) is not None:
            found[key] = value
    for key, names in (("expert_count", _COUNTS), ("expert_shared_feed_forward_length", _SHARED)):
        values = [value for name in names if (value := getattr(config, name, None))]
        found |= {key: values[0]} if values else {}
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        found["expert_feed_forward_length"] = width
    eps = getattr(config, "layer_norm_epsilon", None) or getattr(config, "rms_norm_eps", 1e-6)
    found["attention.layer_norm_rms_epsilon"] = eps
    centred = ("layer_norm_eps", "norm_epsilon", *(("norm_eps",) if kind == "nemotron" else ()))
    if (eps := next((e for key in centred if (e := getattr(config, key, None))), None)) is not None:
        found["attention.layer_norm_epsilon"] = eps
        del found["attention.layer_norm_rms_epsilon"]
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        }
        if "llama_4_scaling_beta" in rope and kind != "mistral4":
            found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    of_family = _OF_FAMILY.get(kind)
    return found if of_family is None else found | of_family(config, found)


def _latent(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    turning, rank = config.qk_rope_head_dim, config.kv_lora_rank
    extra = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turning,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + turning,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": turning,
        "expert_gating_func": 1 if config.model_type in ("deepseek_v2", "mistral4") else 2,
    }
    if config.model_type == "glm4_moe_lite":
        extra["leading_dense_block_count"] = 1
    if (
        config.model_type.startswith(("deepseek", "mistral4"))
        and "rope.scaling.yarn_log_multiplier" in found
    ):
        extra["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    if config.model_type == "deepseek_v2":
        extra["expert_weights_norm"] = False
    return extra


def _minicpm3(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    del found["attention.value_length"]
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {"attention.key_length": width, "rope.dimension_count": config.qk_rope_head_dim}


def _mamba2(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    is_bamba, layers = config.model_type == "bamba", range(config.num_hidden_layers)
    listed = config.attn_layer_indices if is_bamba else []
    attends = [
        index in listed if is_bamba else config.layer_types[index] == "full_attention"
        for index in layers
    ]
    return {
        "attention.head_count_kv": [config.num_key_value_heads * on for on in attends],
        "rope.scaling.finetuned": is_bamba or all(attends),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _nemotron_h(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    kinds, width = config.layers_block_type, config.moe_intermediate_size
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in kinds
        ],
        "feed_forward_length": [
            {"moe": width, "mlp": config.intermediate_size}.get(kind, 0) for kind in kinds
        ],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def _qwen3_moe(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    del found["expert_weights_norm"]  # all are
    return {}


def _qwen3_next(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    del found["expert_weights_norm"]  # all are
    return {
        "full_attention_interval": 2,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


def _gemma4(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    slides, ropes = [k == "sliding_attention" for k in config.layer_types], config.rope_parameters
    own = [config.per_layer_config.get(str(index), {}) for index in range(len(slides))]
    first, full = len(slides) - config.num_kv_shared_layers, _full_head_dim(config)
    wide = 2 if config.use_double_wide_mlp else 1
    extra = {
        "attention.sliding_window_pattern": slides,
        "attention.head_count_kv": [
            layer.get("num_key_value_heads", config.num_key_value_heads) for layer in own
        ],
        "feed_forward_length": [
            config.intermediate_size * (1 if index < first else wide)
            for index in range(len(slides))
        ],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }
    return extra | ({"expert_used_count": config.top_k_experts} if config.enable_moe_block else {})


def _full_head_dim(config: Any) -> int:
    """Elements of a head in layers without a window."""
    found = {layer.get("head_dim", config.head_dim) for layer in config.per_layer_config.values()}
    return int(max(found, default=config.head_dim))


def _olmo3(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    full = config.rope_parameters["full_attention"]
    return _slides(config, found) | {
        "rope.freq_base": float(full["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
    }


def _slides(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window_pattern": kinds} if config.sliding_window else {}


def _minimax_m2(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}


def _cohere(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def _falcon(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    eps = found.pop("attention.layer_norm_rms_epsilon")
    kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    return {
        "attention.layer_norm_epsilon": eps,
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": config.ffn_hidden_size,
        "tensor_data_layout": "jploski",
    }


def _gpt_neox(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    del found["attention.head_count_kv"]
    return {"use_parallel_residual": config.use_parallel_residual}


def _ernie4_5_moe(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_shared_count": config.moe_num_shared_experts,
        # The converter's value, which is not the width.
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": config.moe_layer_interval,
    }


def _hunyuan_moe(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_used_count": config.moe_topk,
        "expert_shared_count": 1,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def _llama4(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "attention.chunk_size": config.attention_chunk_size,
    } | ({} if "chunked_attention" in config.layer_types else {"attention.sliding_window": 0})


_OF_FAMILY = {
    "llama4_text": _llama4,
    "hunyuan_v1_moe": _hunyuan_moe,
    "ernie4_5_moe": _ernie4_5_moe,
    "gpt_neox": _gpt_neox,
    "minicpm3": _minicpm3,
    "mistral4": _latent,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
    "granitemoehybrid": _mamba2,
    "bamba": _mamba2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
    "qwen3_moe": _qwen3_moe,
    "gemma4_text": _gemma4,
    "falcon": _falcon,
    "cohere": _cohere,
    "cohere2": _cohere,
    "olmo3": _olmo3,
    "exaone4": _slides,
    "minimax_m2": _minimax_m2,
}
# A file stores their heads as pairs, though a folder does not.
_PAIRED = ("granite", "ministral3", "bamba", "smollm3", "llama", "arcee", "mixtral")
# Some converters write gate and up of all experts in one tensor.
_MERGED = ("gemma4_text", "mistral4")


def gguf_tensors(
    tensors: dict[str, Tensor], config: Any, architecture: str = ""
) -> dict[str, Tensor]:
    """Tensors of a checkpoint with stacks of experts, under their names in a file."""
    kind, architecture = config.model_type, architecture or architecture_of(config)
    layers = gguf_settings(config)["block_count"]
    found = {
        part if part.startswith("blk.") else known_name(part, architecture, layers): tensor
        for name, whole in tensors.items()
        for part, tensor in _parts(name, whole, config)
    }
    if kind == "gemma4_text":
        width = _full_head_dim(SimpleNamespace(**config.to_dict()))
        share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        pairs, turning = width // 2, int(share * width // 2)
        still = torch.full((pairs - turning,), 1e30)
        found["rope_freqs.weight"] = torch.cat((torch.ones(turning), still))
    return found


def _parts(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that one becomes, under names that gguf's tables know or those of a file."""
    kind, number = config.model_type, [*name.split("."), "", ""][2]
    layer, of_experts, part = name.partition(".experts.")
    is_granite = kind.startswith("granite")
    if of_experts and kind == "llama4_text":
        tensor = tensor.mT
    if of_experts and part == "gate_up_proj" and kind not in _MERGED:
        for own, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            known = f"{layer}.experts.{own}_proj.weight"
            yield f"blk.{number}.ffn_{own}_exps.weight" if is_granite else known, half
    elif of_experts and is_granite:
        yield f"{layer}.output_linear.weight", tensor
    elif of_experts:
        known = f"model.layers.{number}.mlp" if kind == "nemotron_h" else layer
        yield f"{known}.experts.{part}.weight", tensor
    elif name.endswith("kv_b_proj.weight") and kind != "minicpm3":
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b", "k_b"), keys.mT
        yield name.replace("kv_b", "v_b"), values
    elif kind == "glm4_moe" and (head := re.search(r"\.([qkv])_proj\.(weight|bias)$", name)):
        yield f"blk.{number}.attn_{head[1]}.{head[2]}", tensor  # apart, unlike its table's
    elif name.endswith("in_proj_qkvz.weight"):
        yield from _apart(number, tensor, config)
    elif name.endswith("shared_mlp.input_linear.weight"):
        ending = "_shexp" if config.num_local_experts else ""
        for own, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"blk.{number}.ffn_{own}{ending}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield f"blk.{number}.ffn_down.weight", tensor
    elif name.endswith(("router.scale", "per_expert_scale")):
        own = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        yield f"blk.{number}.{own}.scale", tensor
    else:
        yield _renamed(name, kind), _transformed(name, tensor, config)


def _apart(number: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Split Qwen3-Next's first linear by kind; the checkpoint orders it by key head."""
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    values, keys = shared * config.linear_value_head_dim, config.linear_key_head_dim
    heads = tensor.unflatten(0, (config.linear_num_key_heads, -1))
    *qkv, gate = (part.flatten(0, 1) for part in heads.split([keys, keys, values, values], dim=1))
    yield f"blk.{number}.attn_qkv.weight", torch.cat(qkv)
    yield f"blk.{number}.attn_gate.weight", gate


def _renamed(name: str, kind: str) -> str:
    if kind == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
    name = name.replace(".gate.moe_statics", ".moe_statics")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.removesuffix("dt_bias") + "dt_proj.bias" if name.endswith("dt_bias") else name
    return f"{name}.weight" if name.endswith("layer_scalar") else name


def _transformed(name: str, tensor: Tensor, config: Any) -> Tensor:
    kind, part = config.model_type, name.split(".")[-2]
    if name.endswith("A_log"):
        tensor = -tensor.exp()
        return tensor if kind == "qwen3_next" else tensor.view(-1, 1)
    if "moe_statics" in name:
        return tensor.squeeze(0)
    if name.endswith(".D"):
        return tensor.view(-1, 1)
    if part == "conv1d":
        return tensor.squeeze(1) if name.endswith("weight") else tensor
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.view(getattr(config, "n_groups", getattr(config, "mamba_n_groups", 1)), -1)
    if kind == "qwen3_next":
        is_norm = name.endswith("norm.weight") and "linear_attn" not in name
        return tensor + 1 if is_norm else tensor.squeeze(0) if "expert_gate" in name else tensor
    if kind in ("falcon", "gpt_neox") and part == "query_key_value":
        heads = count = config.num_attention_heads
        if kind == "falcon":
            count = config.num_kv_heads if config.new_decoder_architecture else 1
        groups = tensor.view(count, heads // count + 2, config.hidden_size // heads, -1)
        queries, keys, values = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        return torch.cat([p.flatten(0, 2) for p in (queries, keys, values)]).view_as(tensor)
    if kind in ("gemma", "gemma2", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    # Checkpoints of Llama 4 already have pairs.
    is_paired = kind.startswith(_PAIRED) and kind != "llama4_text"
    if is_paired and part in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor
