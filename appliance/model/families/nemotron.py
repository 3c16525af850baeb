"""Nemotron (Minitron): LayerNorm around 1, squared ReLU without gates, and partly rotated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
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
    mlp = MLPSpec(
        config.integer("intermediate_size"),
        read_activation(config, gated=False),
        bias=config.flag("mlp_bias"),
        gated=False,
    )
    layers = config.integer("num_hidden_layers")
    return read_decoder(
        config,
        "nemotron",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(config.number("norm_eps"), offset=1.0, centered=True),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "nemotron", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "relu2",
        "norm_eps": meta.number("attention.layer_norm_epsilon"),
        **gguf_biases(file, attention="attention_bias", mlp="mlp_bias"),
    }


NEMOTRON = Family(
    name="nemotron",
    model_type="nemotron",
    architectures=("NemotronForCausalLM",),
    read=_read,
    names=TensorNames(gate_up=("mlp.up_proj",)),
    gguf=GGUFMapping("nemotron", _gguf, replace(GGUF_NAMES, gate_up=("ffn_up",)), norm_shift=1.0),
)
