"""GLM-4.5, 4.5-Air and 4.6: sigmoid routing in groups, and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.routing import Scoring
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
from appliance.model.names import DraftHeadNames, ExpertNames, TensorNames
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-20  # of its router, in transformers
_SIGMOID = 2  # `expert_gating_func` of GGUF


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=NormSpec(config.number("rms_norm_eps")) if config.flag("use_qk_norm") else None,
    )
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    width = config.integer("moe_intermediate_size")
    experts = read_experts(
        config,
        count="n_routed_experts",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=True,
        grouped=True,
        epsilon=_EPSILON,
        shared_width=width * config.integer("n_shared_experts"),
    )
    return read_decoder(
        config,
        "glm4_moe",
        [attention] * layers,
        experts=[None if index < dense else experts for index in range(layers)],
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "glm4moe", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise meta.refuse("expert_gating_func", f"{_SIGMOID} with this architecture")
    names = file.tensor_names()
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "n_shared_experts": meta.integer("expert_shared_count"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 1),
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
    } | gguf_experts(meta, "n_routed_experts")


def _has_own_names(config: Mapping[str, Any]) -> bool:
    """Return False for Sarvam's, whose tensors lie under other names and in other parts."""
    return config.get("model_type") != "sarvam_moe"


GLM4_MOE = Family(
    name="glm4_moe",
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    read=_read,
    covers=_has_own_names,
    names=TensorNames(
        experts=ExpertNames(
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        )
    ),
    gguf=GGUFMapping("glm4moe", _gguf, replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
    draft_head=DraftHeadNames(),
)
