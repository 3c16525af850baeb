"""Qwen3-Next: the mixers of Qwen 3.5, whose first linears lie by key heads, and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.families.experts import read_experts, read_sparse_layers
from appliance.model.families.family import Family
from appliance.model.families.qwen3_5 import read_mixers
from appliance.model.families.standard import read_decoder
from appliance.model.names import GatedDeltaNames, TensorNames

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    sparse = read_sparse_layers(config)
    experts = read_experts(
        config,
        count="num_experts",
        renormalize=config.flag("norm_topk_prob", True),
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


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    read=_read,
    names=TensorNames(
        gated_delta=GatedDeltaNames(
            joined="linear_attn.in_proj_qkvz", joined_rates="linear_attn.in_proj_ba"
        )
    ),
)
