"""OLMoE: Llama with experts, whose norms of queries and keys span all heads of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.head_norms import HeadNormKind
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
)
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
        head_norms=HeadNormKind.ALL,
    )
    experts = read_experts(
        config,
        count="num_experts",
        width="intermediate_size",
        renormalize=config.flag("norm_topk_prob"),
    )
    layers = config.integer("num_hidden_layers")
    return read_decoder(config, "olmoe", [attention] * layers, experts=[experts] * layers)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        experts = gguf_experts(meta, "num_experts")
        width = experts.pop("moe_intermediate_size", meta.integer("feed_forward_length"))
        found = {"hidden_act": "silu", "norm_topk_prob": False, "intermediate_size": width}
        return found | experts | gguf_biases(file, attention="attention_bias")

    return gguf_config(file, "olmoe", extra)


OLMOE = Family(
    name="olmoe",
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    read=_read,
    gguf=GGUFMapping("olmoe", _gguf, GGUF_NAMES),
)
