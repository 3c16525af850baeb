"""Phi-3 and Phi-4, mini and medium: fused projections, LongRoPE, optional partial rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_window,
)
from appliance.model.names import TensorNames
from appliance.model.spec import RopeScaling

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    rope = read_rope(config, head_dim, partial=True)
    if rope.scaling not in (RopeScaling.NONE, RopeScaling.LONGROPE):
        raise config.refuse("rope_scaling", "longrope with this architecture")
    attention = read_attention(config, rope, head_dim, window=read_window(config))
    return read_decoder(config, "phi3", [attention] * config.integer("num_hidden_layers"))


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "phi3", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    original = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    return {
        "hidden_act": "silu",
        "sliding_window": meta.value("attention.sliding_window") or None,  # 0 means none
        "original_max_position_embeddings": original,
    }


PHI3 = Family(
    name="phi3",
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    read=_read,
    names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    gguf=GGUFMapping("phi3", _gguf, replace(GGUF_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",))),
)
