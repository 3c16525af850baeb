"""StarCoder 2: LayerNorm and biases everywhere, an MLP without gates, and a window."""

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
    read_window,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_WINDOW = 4096  # true of all models; their files lack it


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("use_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        window=read_window(config),
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = read_activation(config, gated=False)
    mlp = MLPSpec(config.integer("intermediate_size"), activation, bias, gated=False)
    layers = config.integer("num_hidden_layers")
    return read_decoder(
        config,
        "starcoder2",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(config.number("norm_epsilon"), centered=True),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "starcoder2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        **gguf_biases(file, attention="use_bias"),
        "norm_epsilon": meta.number("attention.layer_norm_epsilon"),
        "sliding_window": meta.integer("attention.sliding_window", _WINDOW),
    }


STARCODER2 = Family(
    name="starcoder2",
    model_type="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    read=_read,
    names=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    gguf=GGUFMapping("starcoder2", _gguf, replace(GGUF_NAMES, gate_up=("ffn_up",))),
)
