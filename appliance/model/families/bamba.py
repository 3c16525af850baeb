"""Bamba: Mamba-2, and attention in a few layers, which rotates half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_config,
    kv_heads,
    num_layers,
)
from appliance.model.families.mixers import gguf_mamba2_settings, read_mamba2
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
    )
    mamba2, layers = read_mamba2(config), config.integer("num_hidden_layers")
    attends = config.layers("attn_layer_indices", layers)
    return read_decoder(
        config,
        "bamba",
        [attention if index in attends else mamba2 for index in range(layers)],
        mlp_bias=config.flag("mlp_bias"),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "granitehybrid", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    num_heads = meta.integer("attention.head_count")
    heads, width = kv_heads(meta, num_heads), meta.integer("embedding_length") // num_heads
    layers = num_layers(meta)
    if len(heads) != layers or all(heads):
        raise meta.refuse("attention.head_count_kv", f"a list of {layers} layers' with some 0")
    return {
        "hidden_act": "silu",
        "attn_layer_indices": [index for index, count in enumerate(heads) if count],
        "partial_rotary_factor": meta.integer("rope.dimension_count", width) / width,
    } | gguf_mamba2_settings(meta, file, heads.index(0))


def _lacks_multipliers(settings: Mapping[str, Any]) -> bool:
    return "attention.scale" not in settings


BAMBA = Family(
    name="bamba",
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    read=_read,
    names=TensorNames(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
    # Files have the label of Granite 4, which always has multipliers.
    gguf=GGUFMapping(
        "granitehybrid", _gguf, GGUF_NAMES, interleaved_rope=True, is_of=_lacks_multipliers
    ),
)
