"""LFM3: LFM2's convolutions beside attention with windows and without, both with gated heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.families.family import Family
from appliance.model.families.rope import scaled_rope, section_of_layers
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
    read_window,
)
from appliance.model.names import TensorNames
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import AttentionSpec, DecoderSpec, MixerSpec

_CONV, _FULL, _SLIDING = "conv", "full_attention", "sliding_attention"


def _read(config: ConfigReader) -> DecoderSpec:
    count = config.integer("num_hidden_layers")
    kinds = read_layer_kinds(config, {each: each for each in (_CONV, _FULL, _SLIDING)}, count)
    kinds = kinds or [_usual_kind(index) for index in range(count)]
    conv = ShortConvSpec(
        width=config.integer("hidden_size"),
        taps=config.integer("conv_L_cache"),
        bias=config.flag("conv_bias"),
    )
    mixers: dict[str, MixerSpec] = {
        kind: conv if kind == _CONV else _read_attention(config, kind)
        for kind in dict.fromkeys(kinds)
    }
    return read_decoder(
        config,
        "lfm3",
        [mixers[kind] for kind in kinds],
        norm_eps="norm_eps",
        post_norms=config.flag("use_sandwich_norm"),
    )


def _usual_kind(index: int) -> str:
    if index % 4 == 2:
        return _FULL
    return _SLIDING if index % 4 == 0 and index else _CONV


def _read_attention(config: ConfigReader, kind: str) -> AttentionSpec:
    head_dim, window = read_head_dim(config), read_window(config)
    if kind == _SLIDING and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    sections = config.section("rope_parameters")
    if not sections.is_given(kind):
        raise sections.refuse(kind, "a section of these layers")
    section = section_of_layers(sections, kind)
    bias = config.flag("attention_bias")
    return read_attention(
        config,
        scaled_rope(config, section, "rope_theta", head_dim),
        head_dim,
        window=window if kind == _SLIDING else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("norm_eps")),
        head_gates=config.flag("use_attention_gate"),
    )


LFM3 = Family(
    name="lfm3",
    model_type="lfm3",
    architectures=("Lfm3ForCausalLM",),
    read=_read,
    names=TensorNames(
        final_norm="model.embedding_norm",
        mixer_norm="operator_norm",
        mixer_post_norm="post_operator_norm",
        head_gates="self_attn.gate_proj",
        mlp_norm="ffn_norm",
        mlp_post_norm="post_ffn_norm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    ),
)
