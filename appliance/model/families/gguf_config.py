"""Converts GGUF metadata to a Hugging Face config: settings that all families share.

Key names are those of the GGUF specification (docs/gguf.md of the ggml project). Unread metadata is
refused by name, unless it is known not to change the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from appliance.errors import CheckpointError
from appliance.model.families.limits import RANGES
from appliance.model.families.reader import ConfigReader
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

_HARMLESS = frozenset(
    {
        "rope.scaling.finetuned", "tensor_data_layout", "vocab_size", "expert_used_count",
        # For images; a text's tokens have one position, and nothing is added to them.
        "rope.dimension_sections", "n_deepstack_layers", "deepstack_mapping",
    }
)  # fmt: skip
_NEUTRAL = {"expert_count": (0,), "use_parallel_residual": (False,), "attention.causal": (True,)}


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
    prefix = architecture + "."
    meta = ConfigReader(
        {key.removeprefix(prefix): v for key, v in file.metadata.items() if key.startswith(prefix)},
        f"{file.path}: {architecture}",
    )
    config = _shared(meta, file) | extra(meta, file)
    meta.refuse_unread(_NEUTRAL)
    meta.refuse_unknown(_HARMLESS | _NEUTRAL.keys())
    return config


def _shared(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    names = file.tensor_names()
    if "token_embd.weight" not in names:
        raise CheckpointError("the GGUF file has no token_embd.weight; fetch the model again")
    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    is_latent = meta.value("attention.kv_lora_rank") is not None
    if not is_latent and meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.refuse("attention.value_length", f"{head_dim}, as the keys have")
    rotary_dim = meta.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim:
        raise meta.refuse("rope.dimension_count", f"at most {head_dim}, as a head has")
    config = {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": max(of_layers(meta, "feed_forward_length")),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, *kv_heads(meta, num_heads)),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number(
            "attention.layer_norm_rms_epsilon", meta.optional_number("attention.layer_norm_epsilon")
        ),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": gguf_rope_scaling(meta),
        "rope_parameters": {"rope_type": "default"},  # without scaling
        "partial_rotary_factor": rotary_dim / head_dim,
        "tie_word_embeddings": "output.weight" not in names,
    }
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = file.metadata.get(f"tokenizer.ggml.{source}_token_id")
        if token_id is not None:
            config[key] = token_id
    return config


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
    return meta.integers(key, meta.integer("block_count"))


def gguf_experts(meta: ConfigReader, count: str) -> dict[str, Any]:
    """Read the number of experts, as setting `count`, the number chosen and their width."""
    config = {
        count: meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
    }
    if meta.value("expert_feed_forward_length") is not None:
        config["moe_intermediate_size"] = meta.integer("expert_feed_forward_length")
    return config


def gguf_latent(meta: ConfigReader) -> dict[str, Any]:
    """Read the settings of latent attention in newer and older files."""
    rank = "attention.q_lora_rank"
    turning = meta.integer("rope.dimension_count")
    width = meta.integer("attention.key_length_mla", meta.integer("attention.key_length"))
    values = meta.integer("attention.value_length_mla", meta.integer("attention.value_length"))
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
    kind = meta.text("rope.scaling.type", "none")
    if kind in ("none", "longrope"):  # LongRoPE's factors are tensors; its families read them
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer(
            "rope.scaling.original_context_length"
        )
        scaling["beta_fast"] = meta.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = meta.number("rope.scaling.yarn_beta_slow", 1.0)
        log_factor = meta.optional_number("rope.scaling.yarn_log_multiplier")
        if log_factor is not None:  # scales scores, not cosines
            scaling["mscale"] = scaling["mscale_all_dim"] = log_factor
    return scaling


def rope_factors(
    file: GGUFFile, short: str, long: str, original_context: int, attention_factor: float
) -> dict[str, Any]:
    """Build LongRoPE settings from the two tensors of frequency factors."""
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, short),
        "long_factor": _factors(file, long),
        "original_max_position_embeddings": original_context,
        "attention_factor": attention_factor,
    }


def _factors(file: GGUFFile, name: str) -> list[float]:
    shape = file.shape(name) if name in file.tensor_names() else None
    if shape is None or len(shape) != 1 or shape[0] > RANGES["head_dim"].most:
        got = "is missing" if shape is None else f"has shape {shape}"
        raise CheckpointError(
            f"{file.path}: tensor {name} {got}, but must have a factor for each pair of elements "
            "of a head; fetch the model again"
        )
    return cast("Tensor", file.load(name)).tolist()
