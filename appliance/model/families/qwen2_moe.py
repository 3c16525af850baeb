"""Qwen 1.5 and 2 with experts: softmax routing, and a gated shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.experts import read_experts, read_sparse_layers
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_experts
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    rope, bias = read_rope(config, head_dim), config.flag("qkv_bias")
    if config.flag("use_sliding_window"):
        raise config.refuse("use_sliding_window", "false with this architecture")
    config.value("sliding_window")  # has no effect then
    attention = read_attention(config, rope, head_dim, qkv_bias=bias)
    experts = read_experts(
        config,
        count="num_experts",
        renormalize=config.flag("norm_topk_prob"),
        shared_width=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    sparse = read_sparse_layers(config)
    return read_decoder(
        config,
        "qwen2_moe",
        [attention] * len(sparse),
        experts=[experts if chosen else None for chosen in sparse],
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        experts = gguf_experts(meta, "num_experts")
        wide = meta.integer("feed_forward_length")  # of all chosen experts together
        experts.setdefault("moe_intermediate_size", wide // experts["num_experts_per_tok"])
        shared = meta.integer("expert_shared_feed_forward_length", wide)
        return {"hidden_act": "silu", "shared_expert_intermediate_size": shared} | experts

    return gguf_config(file, "qwen2moe", extra)


QWEN2_MOE = Family(
    name="qwen2_moe",
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    read=_read,
    gguf=GGUFMapping("qwen2moe", _gguf, GGUF_NAMES),
)
