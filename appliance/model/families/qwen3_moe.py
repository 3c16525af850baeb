"""Qwen 3 with experts: Qwen 3's attention, and softmax routing without a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.experts import read_experts, read_sparse_layers
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
)
from appliance.model.families.qwen3 import read_qwen3_attention
from appliance.model.families.standard import read_decoder, read_head_dim, read_window

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    sparse = read_sparse_layers(config)
    experts = read_experts(config, count="num_experts", renormalize=config.flag("norm_topk_prob"))
    return read_decoder(
        config,
        "qwen3_moe",
        # either all layers have a window, or none
        read_qwen3_attention(config, read_head_dim(config), [_window(config)] * len(sparse)),
        experts=[experts if chosen else None for chosen in sparse],
    )


def _window(config: ConfigReader) -> int | None:
    config.value("sliding_window")  # without effect where none slides
    return read_window(config) if config.flag("use_sliding_window") else None


def _mapping(architecture: str) -> GGUFMapping:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        biases = gguf_biases(file, attention="attention_bias")
        experts = gguf_experts(meta, "num_experts")
        wide = meta.integer("feed_forward_length")  # of all chosen experts together
        experts.setdefault("moe_intermediate_size", wide // experts["num_experts_per_tok"])
        return {"hidden_act": "silu", "norm_topk_prob": True} | experts | biases

    return GGUFMapping(
        architecture, lambda file: gguf_config(file, architecture, extra), GGUF_NAMES
    )


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    read=_read,
    gguf=_mapping("qwen3moe"),
)
# The text part of Qwen3-VL and Qwen3-Omni with experts.
QWEN3_VL_MOE = replace(QWEN3_MOE, name="qwen3_vl_moe", gguf=_mapping("qwen3vlmoe"))
