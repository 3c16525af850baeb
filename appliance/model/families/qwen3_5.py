"""Qwen 3.5 and 3.6, dense and with experts: Gated DeltaNet, and gated attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import Activation
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
    num_layers,
)
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
)
from appliance.model.names import DraftHeadNames, JoinNames
from appliance.model.recurrent_spec import GatedDeltaSpec
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, MixerSpec


def _read(config: ConfigReader) -> DecoderSpec:
    return read_decoder(config, "qwen3_5", read_mixers(config), norm_offset=1.0)


def _read_moe(config: ConfigReader) -> DecoderSpec:
    mixers = read_mixers(config)
    experts = read_experts(
        config,
        count="num_experts",
        shared_width=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return read_decoder(
        config, "qwen3_5_moe", mixers, experts=[experts] * len(mixers), norm_offset=1.0
    )


def read_mixers(config: ConfigReader) -> list[MixerSpec]:
    """Read Gated DeltaNet for most layers, and gated attention at intervals."""
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    eps = config.number("rms_norm_eps")
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(eps, offset=1.0),
        output_gate=config.flag("attn_output_gate", True),
    )
    delta = _read_delta(config, eps)
    return [attention if attends else delta for attends in _read_attending(config)]


def _read_delta(config: ConfigReader, eps: float) -> GatedDeltaSpec:
    if config.text("mamba_ssm_dtype", "float32") != "float32":
        raise config.refuse("mamba_ssm_dtype", "float32")
    if read_activation(config) is not Activation.SILU:
        raise config.refuse("hidden_act", "silu with this architecture")
    keys = config.integer("linear_num_key_heads")
    values = config.integer("linear_num_value_heads")
    if values % keys:
        raise config.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}")
    return GatedDeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        taps=config.integer("linear_conv_kernel_dim"),
        norm=NormSpec(eps),
    )


def _read_attending(config: ConfigReader) -> list[bool]:
    """Read which layers have attention, from `layer_types` or an interval."""
    count = config.integer("num_hidden_layers")
    kinds = {"full_attention": True, "linear_attention": False}
    if (found := read_layer_kinds(config, kinds, count)) is not None:
        return found
    interval = config.integer("full_attention_interval")
    return [(index + 1) % interval == 0 for index in range(count)]


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "qwen35", gguf_delta)


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        shared = meta.integer("expert_shared_feed_forward_length")
        return (
            gguf_delta(meta, file)
            | gguf_experts(meta, "num_experts")
            | {"shared_expert_intermediate_size": shared}
        )

    return gguf_config(file, "qwen35moe", extra)


def gguf_delta(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """Read the settings of a GGUF file's mixers."""
    heads = meta.integer("ssm.time_step_rank")
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
        "full_attention_interval": meta.integer("full_attention_interval", 4),
        **_layer_types(meta),
        "linear_num_key_heads": meta.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.integer("ssm.state_size"),
        "linear_value_head_dim": meta.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": meta.integer("ssm.conv_kernel"),
    }


def _layer_types(meta: ConfigReader) -> dict[str, list[str]]:
    """Read which layers are recurrent, from files that list them instead of an interval."""
    listed = meta.value("attention.recurrent_layers")
    if not isinstance(listed, list):
        return {}
    kinds = ["linear_attention" if item else "full_attention" for item in listed]
    return {"layer_types": kinds[: num_layers(meta)]}


_DRAFT_HEAD = DraftHeadNames(
    count="mtp_num_hidden_layers",
    layer="mtp.layers.{}.",
    join=JoinNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
    final_norm="mtp.norm",
    chains_normed=True,
)
_GGUF_NAMES = replace(GGUF_NAMES, mlp_norm="post_attention_norm")

QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    read=_read,
    gguf=GGUFMapping("qwen35", _gguf, _GGUF_NAMES, norm_shift=1.0, tiled_values=True),
    draft_head=_DRAFT_HEAD,
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    read=_read_moe,
    gguf=GGUFMapping("qwen35moe", _gguf_moe, _GGUF_NAMES, norm_shift=1.0, tiled_values=True),
    draft_head=_DRAFT_HEAD,
)
