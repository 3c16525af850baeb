"""Seed-OSS: Llama with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace
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
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_out_bias"),
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "seed_oss", layers, mlp_bias=config.flag("mlp_bias"))


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "seed_oss", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    biases = gguf_biases(file, attention="attention_bias", mlp="mlp_bias")
    return {"hidden_act": "silu"} | biases


SEED_OSS = Family(
    name="seed_oss",
    model_type="seed_oss",
    architectures=("SeedOssForCausalLM",),
    read=_read,
    gguf=GGUFMapping("seed_oss", _gguf, replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
)
