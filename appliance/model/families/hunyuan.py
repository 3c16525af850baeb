"""Hunyuan, dense and with experts: Llama that norms heads of queries and keys after their rotation.

A softmax chooses experts beside an MLP of all tokens. Their numbers may be listed by layer.
"""

from __future__ import annotations

from dataclasses import replace
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
from appliance.model.families.rope import read_rope, rope_kind, rope_section
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import AttentionSpec, NormSpec, RopeSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    layers = config.integer("num_hidden_layers")
    return read_decoder(config, "hunyuan", [_read_attention(config)] * layers)


def _read_attention(config: ConfigReader) -> AttentionSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    return read_attention(
        config,
        _read_rope(config, head_dim),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
        head_norms=HeadNormKind.ROTATED,
    )


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the rotary settings; a fixed alpha raises the base, as "dynamic" RoPE would by length.

    Of that kind all other settings are without effect.
    """
    section = rope_section(config)
    if rope_kind(section) != "dynamic" or not section.value("alpha") or head_dim <= 2:
        return read_rope(config, head_dim)
    theta = section.number("rope_theta", config.number("rope_theta"))
    scaled = theta * section.number("alpha") ** (head_dim / (head_dim - 2))
    return RopeSpec(theta=scaled, rotary_dim=head_dim)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "hunyuan-dense", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    meta.value("rope.scaling.original_context_length")  # the base is scaled already
    return {"hidden_act": "silu"} | gguf_biases(file, attention="attention_bias")


_NAMES = replace(
    TensorNames(),
    query_norm="self_attn.query_layernorm",
    key_norm="self_attn.key_layernorm",
    experts=ExpertNames(
        router="mlp.gate.wg",
        shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
)
HUNYUAN = Family(
    name="hunyuan",
    model_type="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    read=_read,
    names=_NAMES,
    gguf=GGUFMapping("hunyuan-dense", _gguf, GGUF_NAMES),
)


def _read_moe(config: ConfigReader) -> DecoderSpec:
    shared = config.value("num_shared_expert", 1)
    if any(count != 1 for count in (shared if isinstance(shared, list) else [shared])):
        raise config.refuse("num_shared_expert", "1")
    width = "intermediate_size"  # of experts too, whatever moe_intermediate_size is
    experts = read_experts(
        config,
        count="num_experts",
        chosen="moe_topk",
        width=width,
        shared_width=config.integer(width),
        by_layer=True,
    )
    layers = config.integer("num_hidden_layers")
    attention = [_read_attention(config)] * layers
    return read_decoder(config, "hunyuan_moe", attention, experts=[experts] * layers)


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "hunyuan-moe", _gguf_moe_extra)


def _gguf_moe_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    experts = gguf_experts(meta, "num_experts")
    return {
        "moe_topk": experts.pop("num_experts_per_tok"),
        "num_shared_expert": meta.integer("expert_shared_count", 1),
        **experts,
        **_gguf_extra(meta, file),
    }


HUNYUAN_MOE = Family(
    name="hunyuan_moe",
    model_type="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    read=_read_moe,
    names=_NAMES,
    gguf=GGUFMapping("hunyuan-moe", _gguf_moe, GGUF_NAMES),
)
