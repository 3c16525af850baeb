"""Ministral 3, the text part of Mistral 3: YaRN, and queries that grow with their position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_growing_rope
from appliance.model.families.rope import read_growing_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_window,
)

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_growing_rope(config, head_dim, head_dim),
        head_dim,
        window=read_window(config),
    )
    return read_decoder(config, "ministral3", [attention] * config.integer("num_hidden_layers"))


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "mistral3", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "silu", "rope_scaling": None, "rope_parameters": gguf_growing_rope(meta)}


MINISTRAL3 = Family(
    name="ministral3",
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM",),
    read=_read,
    gguf=GGUFMapping("mistral3", _gguf, GGUF_NAMES, interleaved_rope=True),
)
