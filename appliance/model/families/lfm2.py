"""LFM2 and LFM2.5, dense and with experts: short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_config,
    gguf_experts,
    kv_heads,
    num_layers,
)
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
)
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, MixerSpec

_EPSILON = 1e-6  # of the router, in transformers
_SIGMOID = 2  # `expert_gating_func` of GGUF


def _read(config: ConfigReader) -> DecoderSpec:
    return read_decoder(
        config,
        "lfm2",
        _read_mixers(config),
        width=_read_width(config),
        norm_eps="norm_eps",
    )


def _read_moe(config: ConfigReader) -> DecoderSpec:
    mixers, dense = _read_mixers(config), config.integer("num_dense_layers")
    experts = read_experts(
        config,
        count="num_experts",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=config.flag("use_expert_bias"),
        scale=config.number("routed_scaling_factor"),
        epsilon=_EPSILON,
    )
    return read_decoder(
        config,
        "lfm2_moe",
        mixers,
        experts=[None if index < dense else experts for index in range(len(mixers))],
        norm_eps="norm_eps",
    )


def _read_mixers(config: ConfigReader) -> list[MixerSpec]:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        qk_norm=NormSpec(config.number("norm_eps")),
    )
    conv = ShortConvSpec(
        width=config.integer("hidden_size"),
        taps=config.integer("conv_L_cache"),
        bias=config.flag("conv_bias"),
    )
    return [attention if attends else conv for attends in _read_attending(config)]


def _read_attending(config: ConfigReader) -> list[bool]:
    """Read which layers have attention, from `layer_types` or the older list of indices."""
    count = config.integer("num_hidden_layers")
    found = read_layer_kinds(config, {"full_attention": True, "conv": False}, count)
    indices = config.value("full_attn_idxs")
    if found is None and not isinstance(indices, list):
        raise CheckpointError(
            f"{config.origin}: layer_types must list {count} layers;"
            " take the config.json of its makers"
        )
    return found or [index in indices for index in range(count)]


def _read_width(config: ConfigReader) -> int:
    """Read the MLP's width, which most configs give before an adjustment."""
    width = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(config.number("block_ffn_dim_multiplier") * int(2 * width / 3))
    step = config.integer("block_multiple_of")
    return -(-width // step) * step


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "lfm2", _gguf_extra)


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        if meta.value("expert_gating_func", _SIGMOID) != _SIGMOID:
            raise meta.refuse("expert_gating_func", f"{_SIGMOID} with this architecture")
        return (
            _gguf_extra(meta, file)
            | gguf_experts(meta, "num_experts")
            | {"num_dense_layers": meta.integer("leading_dense_block_count")}
        )

    return gguf_config(file, "lfm2moe", extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    heads = kv_heads(meta, meta.integer("attention.head_count"))
    if len(heads) == 1:
        heads *= num_layers(meta)
    return {
        "hidden_act": "silu",
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    mixer_norm="operator_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    experts=ExpertNames(
        router="feed_forward.gate",
        selection_bias="feed_forward.expert_bias",
        gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        down="feed_forward.experts.{}.w2",
        stacked_gate_up="feed_forward.experts.gate_up_proj",
        stacked_down="feed_forward.experts.down_proj",
    ),
)
_GGUF_NAMES = replace(GGUF_NAMES, final_norm="token_embd_norm")

LFM2 = Family(
    name="lfm2",
    model_type="lfm2",
    architectures=("Lfm2ForCausalLM",),
    read=_read,
    names=_NAMES,
    gguf=GGUFMapping("lfm2", _gguf, _GGUF_NAMES),
)
LFM2_MOE = Family(
    name="lfm2_moe",
    model_type="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    read=_read_moe,
    names=_NAMES,
    gguf=GGUFMapping("lfm2moe", _gguf_moe, _GGUF_NAMES),
)
