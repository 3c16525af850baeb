"""Converts GGUF metadata to a Hugging Face config: settings that all families share.

Key names are those of the GGUF specification (docs/gguf.md of the ggml project).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from appliance.errors import CheckpointError
from appliance.model.families.gguf_settings import GGUFSettings
from appliance.model.families.limits import RANGES
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS
from appliance.model.names import (
    ExpertNames,
    GatedDeltaNames,
    LatentNames,
    Mamba2Names,
    ShortConvNames,
    TensorNames,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader

_SCALINGS = ("none", "linear", "yarn", "longrope")  # all that llama.cpp knows
GGUF_NAMES = TensorNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    mixer_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    output="attn_output",
    mixer_post_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    mlp_post_norm="post_ffw_norm",
    experts=ExpertNames(
        router="ffn_gate_inp",
        selection_bias="exp_probs_b.bias",
        gate_up=("ffn_gate_exps", "ffn_up_exps"),
        down="ffn_down_exps",
        shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
        shared_down="ffn_down_shexp",
        shared_gate="ffn_gate_inp_shexp",
        into_latent="ffn_latent_down",
        out_of_latent="ffn_latent_up",
        stacked_gate_up="ffn_gate_up_exps",
        router_norm="ffn_gate_inp.scale",
        expert_scale="ffn_down_exps.scale",
        input_norm="pre_ffw_norm_2",
        shared_norm="post_ffw_norm_1",
        output_norm="post_ffw_norm_2",
    ),
    latent=LatentNames(
        query="attn_q",
        query_down="attn_q_a",
        query_norm="attn_q_a_norm",
        query_up="attn_q_b",
        token="attn_kv_a_mqa",
        norm="attn_kv_a_norm",
        heads="attn_kv_b",
        keys="attn_k_b",
        values="attn_v_b",
    ),
    mamba2=Mamba2Names(
        input="ssm_in",
        filter="ssm_conv1d",
        step_bias="ssm_dt.bias",
        log_rates="ssm_a",
        skip="ssm_d",
        norm="ssm_norm",
        output="ssm_out",
    ),
    short_conv=ShortConvNames(
        input="shortconv.in_proj", filter="shortconv.conv", output="shortconv.out_proj"
    ),
    gated_delta=GatedDeltaNames(
        qkv="attn_qkv",
        gate="attn_gate",
        share="ssm_beta",
        decay="ssm_alpha",
        filter="ssm_conv1d",
        log_rates="ssm_a",
        decay_bias="ssm_dt.bias",
        norm="ssm_norm",
        output="ssm_out",
    ),
)


def gguf_config(
    file: GGUFFile, architecture: str, extra: Callable[[ConfigReader, GGUFFile], dict[str, Any]]
) -> dict[str, Any]:
    """Build a Hugging Face config without `architectures` and `model_type`.

    Args:
        architecture: value of `general.architecture`, the prefix of the settings.
        extra: reads the family's own settings; its result overrides the shared ones.

    Raises:
        CheckpointError: a setting is missing or of the wrong type.
        UnsupportedModelError: an unread setting changes the arithmetic.
    """
    meta = GGUFSettings(file, architecture)
    config = _shared(meta, file) | extra(meta, file)
    meta.refuse_rest()
    return config


def _shared(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    names = file.tensor_names()
    if "token_embd.weight" not in names:
        raise CheckpointError(
            f"{file.path} has no token_embd.weight; use another file of the model"
        )
    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    is_latent = meta.value("attention.kv_lora_rank") is not None
    if not is_latent and meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.refuse("attention.value_length", f"{head_dim}, as the keys have")
    rotary_dim = meta.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim:
        raise meta.refuse("rope.dimension_count", f"at most {head_dim}, as a head has")
    vocab_size = file.shape("token_embd.weight")[0]
    config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": max(of_layers(meta, "feed_forward_length")),
        "num_hidden_layers": num_layers(meta),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, *kv_heads(meta, num_heads)),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(meta),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_factors(meta, file) or gguf_rope_scaling(meta),
        "rope_parameters": {"rope_type": "default"},  # without scaling
        "partial_rotary_factor": rotary_dim / head_dim,
        "tie_word_embeddings": "output.weight" not in names,
    }
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = file.metadata.get(f"tokenizer.ggml.{source}_token_id")
        if type(token_id) is int and 0 <= token_id < vocab_size:  # 2^32 - 1 is none
            config[key] = token_id
    return config


def num_layers(meta: ConfigReader) -> int:
    """Return the number of layers: blocks that predict further tokens are none."""
    blocks, further = meta.integer("block_count"), meta.integer("nextn_predict_layers", 0)
    if further >= blocks:
        raise meta.refuse("nextn_predict_layers", f"fewer than the {blocks} of block_count")
    return blocks - further


def _epsilon(meta: ConfigReader) -> float:
    rms = "attention.layer_norm_rms_epsilon"
    return meta.number(rms if rms in meta else "attention.layer_norm_epsilon")


def gguf_biases(file: GGUFFile, *, attention: str = "", mlp: str = "") -> dict[str, bool]:
    """Set the settings that give linears of attention and MLP their biases.

    Absent ones are zeros; see `gguf_tensors`.
    """
    parts = {
        attention: ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
        mlp: ("ffn_gate", "ffn_up", "ffn_down"),
    }
    biased = {name.split(".")[-2] for name in file.tensor_names() if name.endswith(".bias")}
    return {key: not biased.isdisjoint(names) for key, names in parts.items() if key}


def kv_heads(meta: ConfigReader, usual: int) -> tuple[int, ...]:
    """Read the number of KV heads, or a list per layer: 0 without attention."""
    return of_layers(meta, "attention.head_count_kv", usual)


def of_layers(meta: ConfigReader, key: str, usual: int | None = None) -> tuple[int, ...]:
    """Read a number for all layers, or a list per layer, in which 0 is allowed."""
    if not isinstance(meta.value(key), list):
        return (meta.integer(key, usual),)
    layers = num_layers(meta)
    listed = meta.value(key)
    # Some writers list the blocks that predict further tokens too.
    count = len(listed) if len(listed) == meta.integer("block_count") else layers
    return meta.integers(key, count)[:layers]


def gguf_layer_types(meta: ConfigReader, period: int) -> list[str]:
    """Read each layer's kind; without a list, every `period`th layer sees everything."""
    key, layers = "attention.sliding_window_pattern", num_layers(meta)
    listed = meta.value(key, period)
    if isinstance(listed, list):
        if len(listed) < layers:
            raise meta.refuse(key, f"a list of {layers} layers")
        slides = [bool(item) for item in listed[:layers]]
    else:
        every = meta.integer(key, period)
        slides = [(index + 1) % every != 0 for index in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def gguf_experts(meta: ConfigReader, count: str) -> dict[str, Any]:
    """Read the number of experts, as setting `count`, the number chosen and their width."""
    config = {
        count: meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
    }
    if meta.value("expert_feed_forward_length") is not None:
        config["moe_intermediate_size"] = meta.integer("expert_feed_forward_length")
    return config


def gguf_latent(meta: ConfigReader, value_width: int | None = None) -> dict[str, Any]:
    """Read the settings of latent attention in newer and older files.

    `value_width` is that of a head's values if the file does not say it.
    """
    rank = "attention.q_lora_rank"
    turning = meta.integer("rope.dimension_count")
    width = meta.integer("attention.key_length_mla", meta.integer("attention.key_length"))
    values = meta.integer(
        "attention.value_length_mla",
        value_width or meta.integer("attention.value_length"),
    )
    return {
        "q_lora_rank": None if meta.value(rank) is None else meta.integer(rank),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        "v_head_dim": values,
        "head_dim": turning,
        "partial_rotary_factor": None,
    }


def gguf_mamba2(meta: ConfigReader, file: GGUFFile, layer: int) -> dict[str, int | bool]:
    """Read the settings of Mamba-2 layers, such as `layer`, under this function's own names."""
    names, heads = file.tensor_names(), meta.integer("ssm.time_step_rank")
    return {
        "heads": heads,
        "head_dim": meta.integer("ssm.inner_size") // heads,
        "groups": meta.integer("ssm.group_count"),
        "state": meta.integer("ssm.state_size"),
        "taps": meta.integer("ssm.conv_kernel"),
        "filter_bias": f"blk.{layer}.ssm_conv1d.bias" in names,
        "bias": f"blk.{layer}.ssm_in.bias" in names,
    }


def gguf_growing_rope(meta: ConfigReader) -> dict[str, Any]:
    """Read the rotary settings of models whose queries grow with their position."""
    found = gguf_rope_scaling(meta) or {"rope_type": "default"}
    found["rope_theta"] = meta.number("rope.freq_base", 10000.0)
    if meta.value("attention.temperature_scale") is not None:
        found["llama_4_scaling_beta"] = meta.number("attention.temperature_scale")
    return found


def gguf_rope_scaling(meta: ConfigReader) -> dict[str, Any] | None:
    """Read the scaling of frequencies as a Hugging Face config describes it."""
    kind = meta.text("rope.scaling.type", "linear")  # llama.cpp's default, without effect at 1
    if kind not in _SCALINGS:
        raise meta.refuse("rope.scaling.type", ", ".join(_SCALINGS))
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    if kind in ("none", "longrope") or (factor == 1.0 and kind in ("linear", "yarn")):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer(
            "rope.scaling.original_context_length", meta.integer("context_length")
        )
        scaling["beta_fast"] = meta.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = meta.number("rope.scaling.yarn_beta_slow", 1.0)
        log_factor = meta.optional_number("rope.scaling.yarn_log_multiplier")
        if log_factor is not None:  # scales scores, not cosines
            scaling["mscale"] = scaling["mscale_all_dim"] = log_factor
        attention_factor = meta.number("rope.scaling.attn_factor", 1.0)
        if attention_factor != 1.0:
            usual = 1.0 if log_factor is not None else 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = attention_factor * usual
    return scaling


def _rope_factors(meta: ConfigReader, file: GGUFFile) -> dict[str, Any] | None:
    """Read tensors that divide frequencies: LongRoPE's two, or the one of Llama 3.1's scaling."""
    names = file.tensor_names()
    context = meta.integer("context_length")
    short, long = SHORT_FACTORS, LONG_FACTORS
    if long in names:
        context = meta.integer("rope.scaling.original_context_length", context)
        meta.value("rope.scaling.factor")  # the factors have it in them
    elif FREQUENCY_DIVISORS in names:
        if gguf_rope_scaling(meta) is not None:
            raise meta.refuse("rope.scaling.type", f"none beside {FREQUENCY_DIVISORS}")
        short = long = FREQUENCY_DIVISORS
    else:
        return None
    meta.value("rope.scaling.type")
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, short),
        "long_factor": _factors(file, long),
        "original_max_position_embeddings": context,
        "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
    }


def _factors(file: GGUFFile, name: str) -> list[float]:
    shape = file.shape(name) if name in file.tensor_names() else None
    if shape is None or len(shape) != 1 or shape[0] > RANGES["head_dim"].most:
        got = "is missing" if shape is None else f"has shape {shape}"
        raise CheckpointError(
            f"{file.path}: tensor {name} {got}, but must have a factor for each pair of elements "
            "of a head; use another file of the model"
        )
    return cast("Tensor", file.load(name)).tolist()
