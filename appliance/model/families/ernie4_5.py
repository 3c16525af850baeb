"""ERNIE 4.5, dense and with experts: Llama whose heads rotate by neighbouring elements.

A softmax chooses experts, with a bias for the choice only; some are shared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("use_bias")
    rope = read_rope(config, head_dim)
    attention = read_attention(config, rope, head_dim, qkv_bias=bias, output_bias=bias)
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, "ernie4_5", layers, mlp_bias=bias)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "ernie4_5", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "silu"} | gguf_biases(file, attention="use_bias")


ERNIE4_5 = Family(
    name="ernie4_5",
    model_type="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    read=_read,
    names=TensorNames(rotated_pairs=True),
    gguf=GGUFMapping("ernie4_5", _gguf, replace(GGUF_NAMES, rotated_pairs=True)),
)


def _read_moe(config: ConfigReader) -> DecoderSpec:
    if config.flag("use_bias"):
        raise config.refuse("use_bias", "false beside experts")
    if config.text("moe_gate", "topk") != "topk":
        raise config.refuse("moe_gate", "topk")
    head_dim, layers = read_head_dim(config), config.integer("num_hidden_layers")
    attention = read_attention(config, read_rope(config, head_dim), head_dim)
    shared = config.optional_integer("moe_num_shared_experts") or 0
    config.number("moe_norm_min")  # a least sum of weights, which a softmax is above
    experts = read_experts(
        config,
        count="moe_num_experts",
        chosen="moe_k",
        selection_bias=True,
        shared_width=shared * config.integer("moe_intermediate_size"),
    )
    first, last = config.integer("moe_layer_start_index"), config.value("moe_layer_end_index")
    if type(last) is not int or last < -1:
        raise config.refuse("moe_layer_end_index", "the number of a layer, or -1 for the last")
    step = config.integer("moe_layer_interval")
    ends = layers - 1 if last == -1 else last
    has_experts = [first <= i <= ends and (i + 1) % step == 0 for i in range(layers)]
    return read_decoder(
        config,
        "ernie4_5_moe",
        [attention] * layers,
        experts=[experts if sparse else None for sparse in has_experts],
    )


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "ernie4_5-moe", _gguf_moe_extra)


def _gguf_moe_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    experts = gguf_experts(meta, "moe_num_experts")
    return {
        "hidden_act": "silu",
        "moe_k": experts.pop("num_experts_per_tok"),
        "moe_num_shared_experts": meta.integer("expert_shared_count", 0),
        "moe_layer_start_index": meta.integer("leading_dense_block_count", 0),
        "moe_layer_interval": meta.integer("interleave_moe_layer_step", 1),
    } | experts


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    model_type="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    read=_read_moe,
    names=TensorNames(
        rotated_pairs=True,
        experts=ExpertNames(
            selection_bias="mlp.moe_statics.e_score_correction_bias",
            selection_bias_in_row=True,
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        ),
    ),
    gguf=GGUFMapping("ernie4_5-moe", _gguf_moe, replace(GGUF_NAMES, rotated_pairs=True)),
)
