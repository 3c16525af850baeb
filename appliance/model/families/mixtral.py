"""Mixtral: Mistral's attention, and softmax routing over few, wide experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping, gguf_has_experts
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_experts
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_window,
)
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, window=read_window(config)
    )
    layers = config.integer("num_hidden_layers")
    experts = read_experts(config, count="num_local_experts", width="intermediate_size")
    return read_decoder(config, "mixtral", [attention] * layers, experts=[experts] * layers)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        experts = gguf_experts(meta, "num_local_experts")
        width = experts.pop("moe_intermediate_size", meta.integer("feed_forward_length"))
        return {"hidden_act": "silu", "intermediate_size": width} | experts

    return gguf_config(file, "llama", extra)


MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    read=_read,
    names=TensorNames(
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            down="block_sparse_moe.experts.{}.w2",
        )
    ),
    gguf=GGUFMapping("llama", _gguf, GGUF_NAMES, interleaved_rope=True, is_of=gguf_has_experts),
)
