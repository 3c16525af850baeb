"""Llama 1 to 3, SmolLM 1 and 2, and the many models that share their architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias")
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, qkv_bias=bias, output_bias=bias
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "llama", layers, mlp_bias=config.flag("mlp_bias"))


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "llama", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    biases = gguf_biases(file, attention="attention_bias", mlp="mlp_bias")
    return {"hidden_act": "silu"} | biases


LLAMA = Family(
    name="llama",
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    read=_read,
    gguf=GGUFMapping("llama", _gguf, GGUF_NAMES, interleaved_rope=True),
)
