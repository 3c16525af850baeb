"""ERNIE 4.5, dense: Llama whose heads rotate by neighbouring elements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("use_bias")
    rope = read_rope(config, head_dim)
    attention = read_attention(config, rope, head_dim, qkv_bias=bias, output_bias=bias)
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "ernie4_5", layers, mlp_bias=bias)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "ernie4_5", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "silu"} | gguf_biases(file, attention="use_bias")


ERNIE4_5 = Family(
    name="ernie4_5",
    model_type="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    read=_read,
    names=TensorNames(rotated_pairs=True),
    gguf=GGUFMapping("ernie4_5", _gguf, replace(GGUF_NAMES, rotated_pairs=True)),
)
