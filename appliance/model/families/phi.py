"""Phi 1, 1.5 and 2: attention and MLP read one norm; every linear has a bias, the head too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
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
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    if config.flag("tie_word_embeddings"):
        raise config.refuse("tie_word_embeddings", "false beside a head with a bias")
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=True,
        output_bias=True,
    )
    mlp = MLPSpec(
        config.integer("intermediate_size"),
        read_activation(config, gated=False),
        bias=True,
        gated=False,
    )
    layers = config.integer("num_hidden_layers")
    decoder = read_decoder(
        config,
        "phi",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(config.number("layer_norm_eps"), centered=True),
    )
    made = (replace(layer, parallel=True, one_norm=True) for layer in decoder.layers)
    return replace(decoder, layers=tuple(made), head_bias=True)


def _lacks_head_norms(config: Mapping[str, Any]) -> bool:
    return not config.get("qk_layernorm")


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "phi2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_new",
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
    }


PHI = Family(
    name="phi",
    model_type="phi",
    architectures=("PhiForCausalLM",),
    read=_read,
    covers=_lacks_head_norms,
    names=TensorNames(
        final_norm="model.final_layernorm",
        output="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
    ),
    gguf=GGUFMapping("phi2", _gguf, replace(GGUF_NAMES, gate_up=("ffn_up",))),
)
