"""Ling 1 and 2.0 (BailingMoe): experts behind fused attention, whose heads the second norms.

Ling 2.0 chooses experts as GLM-4.5, Ling 1 by softmax; the head of Ling 1 may have normed columns.

transformers has no class of it: defaults and arithmetic are those of the code that its maker
publishes beside the weights, which is never run.
"""

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
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import HeadNorm, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-20  # of its router
_SIGMOID = 2  # `expert_gating_func` of GGUF


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=config.flag("use_qkv_bias"),
        output_bias=config.flag("use_bias"),
        qk_norm=NormSpec(config.number("rms_norm_eps")) if config.flag("use_qk_norm") else None,
    )
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    shared = config.optional_integer("num_shared_experts") or 0
    shared *= config.integer("moe_intermediate_size")
    experts = read_experts(
        config,
        count="num_experts",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=config.flag("moe_router_enable_expert_bias"),
        grouped=True,
        epsilon=_EPSILON,
        shared_width=shared,
    )
    return read_decoder(
        config,
        "bailing_moe_v2",
        [attention] * layers,
        experts=[None if index < dense else experts for index in range(layers)],
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "bailingmoe2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise meta.refuse("expert_gating_func", f"{_SIGMOID} with this architecture")
    names, dense = file.tensor_names(), meta.integer("leading_dense_block_count", 0)
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="use_qkv_bias"),
        "use_bias": "blk.0.attn_output.bias" in names,
        "moe_router_enable_expert_bias": f"blk.{dense}.exp_probs_b.bias" in names,
        "num_shared_experts": meta.integer("expert_shared_count"),
        "first_k_dense_replace": dense,
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
    } | gguf_experts(meta, "num_experts")


BAILING_MOE_V2 = Family(
    name="bailing_moe_v2",
    model_type="bailing_moe_v2",
    architectures=("BailingMoeV2ForCausalLM",),
    read=_read,
    names=TensorNames(
        embedding="model.word_embeddings",
        qkv=("attention.query_key_value",),
        query_norm="attention.query_layernorm",
        key_norm="attention.key_layernorm",
        output="attention.dense",
        experts=ExpertNames(
            selection_bias="mlp.gate.expert_bias",
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        ),
    ),
    gguf=GGUFMapping("bailingmoe2", _gguf, replace(GGUF_NAMES, qkv=("attn_qkv",))),
    defaults=ClassDefaults(
        values={
            "hidden_act": "silu",
            "use_qkv_bias": False,
            "use_bias": False,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 600000.0,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": False,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "moe_router_enable_expert_bias": True,
        },
        known=frozenset({"head_dim", "num_key_value_heads", "rope_scaling", "score_function"}),
    ),
)


def _read_first(config: ConfigReader) -> DecoderSpec:
    if config.flag("use_bias"):
        raise config.refuse("use_bias", "false beside experts")
    if config.flag("multi_gate"):
        raise config.refuse("multi_gate", "false, which has one router")
    head_dim = read_head_dim(config)
    attention = read_attention(
        config, read_rope(config, head_dim), head_dim, qkv_bias=config.flag("use_qkv_bias")
    )
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    width = config.integer("moe_intermediate_size")
    shared = config.optional_integer("num_shared_experts") or 0
    experts = read_experts(
        config,
        count="num_experts",
        renormalize=config.flag("norm_topk_prob"),
        shared_width=shared * width,
    )
    decoder = read_decoder(
        config,
        "bailing_moe",
        [attention] * layers,
        experts=[None if index < dense else experts for index in range(layers)],
    )
    normed = HeadNorm.COLUMNS if config.flag("norm_head") else None
    return replace(decoder, head_norm=normed)


def _gguf_first(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "bailingmoe", _gguf_first_extra)


def _gguf_first_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "norm_head": False,  # the converter has done it
        "use_bias": False,
        **gguf_biases(file, attention="use_qkv_bias"),
        "num_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
    } | gguf_experts(meta, "num_experts")


BAILING_MOE = Family(
    name="bailing_moe",
    model_type="bailing_moe",
    architectures=("BailingMoeForCausalLM",),
    read=_read_first,
    names=BAILING_MOE_V2.names,
    gguf=GGUFMapping(
        "bailingmoe",
        _gguf_first,
        GGUF_NAMES,
        interleaved_rope=True,
        own_names=replace(BAILING_MOE_V2.names, qkv=("attention.q", "attention.k", "attention.v")),
    ),
    defaults=ClassDefaults(
        values={
            "vocab_size": 30592,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 16384,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "use_qkv_bias": False,
            "use_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "first_k_dense_replace": 0,
            "num_shared_experts": 0,
            "norm_head": False,
            "norm_topk_prob": True,
            "multi_gate": False,
        },
        known=frozenset({"head_dim", "num_key_value_heads", "rope_scaling", "norm_softmax"}),
    ),
)
