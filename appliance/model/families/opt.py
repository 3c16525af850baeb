"""OPT: learned positions, LayerNorm with biases before or after each part, no gates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model.families.family import Family
from appliance.model.families.rope import without_positions
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec, NormSpec, PositionSpec

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-5
_SKIPPED = 2  # rows of the position table before position 0


def _read(config: ConfigReader) -> DecoderSpec:
    if not config.flag("layer_norm_elementwise_affine"):
        raise config.refuse("layer_norm_elementwise_affine", "true")
    if config.flag("_remove_final_layer_norm"):
        raise config.refuse("_remove_final_layer_norm", "false")
    head_dim, bias = read_head_dim(config), config.flag("enable_bias")
    config.value("num_key_value_heads")  # without effect
    attention = read_attention(
        config,
        without_positions(head_dim),
        head_dim,
        num_kv_heads=config.integer("num_attention_heads"),
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = read_activation(config, "activation_function", gated=False)
    mlp = MLPSpec(config.integer("ffn_dim"), activation, bias, gated=False)
    layers, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    decoder = read_decoder(
        config,
        "opt",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(_EPSILON, centered=True),
    )
    width = config.integer("word_embed_proj_dim", hidden)
    return replace(
        decoder,
        positions=PositionSpec(decoder.context_length, _SKIPPED),
        norms_replace=not config.flag("do_layer_norm_before"),
        embedding_width=None if width == hidden else width,
    )


OPT = Family(
    name="opt",
    model_type="opt",
    architectures=("OPTForCausalLM",),
    read=_read,
    names=TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        into_stream="model.decoder.project_in",
        out_of_stream="model.decoder.project_out",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
        mixer_norm="self_attn_layer_norm",
        output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        gate_up=("fc1",),
        down="fc2",
    ),
)
