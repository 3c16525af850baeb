"""Qwen3-Next: Qwen 3.5's mixers with first linears grouped by key head, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.experts import read_experts, read_sparse_layers
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_experts
from appliance.model.families.qwen3_5 import gguf_delta, read_mixers
from appliance.model.families.standard import read_decoder
from appliance.model.names import GatedDeltaNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    sparse = read_sparse_layers(config)
    experts = read_experts(
        config,
        count="num_experts",
        renormalize=config.flag("norm_topk_prob"),
        shared_width=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return read_decoder(
        config,
        "qwen3_next",
        read_mixers(config),
        experts=[experts if chosen else None for chosen in sparse],
        norm_offset=1.0,
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        shared = meta.integer("expert_shared_feed_forward_length")
        return (
            gguf_delta(meta, file)
            | gguf_experts(meta, "num_experts")
            | {"shared_expert_intermediate_size": shared}
        )

    return gguf_config(file, "qwen3next", extra)


_RATES = "linear_attn.in_proj_ba"

QWEN3_NEXT = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    read=_read,
    names=TensorNames(
        gated_delta=GatedDeltaNames(joined="linear_attn.in_proj_qkvz", joined_rates=_RATES)
    ),
    gguf=GGUFMapping(
        "qwen3next",
        _gguf,
        replace(
            GGUF_NAMES,
            mlp_norm="post_attention_norm",
            gated_delta=replace(GGUF_NAMES.gated_delta, joined_rates="ssm_ba"),
        ),
        norm_shift=1.0,
        own_names=TensorNames(gated_delta=GatedDeltaNames(joined_rates=_RATES)),
    ),
)
