"""Hunyuan, dense: Llama that norms the heads of queries and keys after their rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope, rope_kind, rope_section
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames
from appliance.model.spec import HeadNormKind, NormSpec, RopeSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        _read_rope(config, head_dim),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
        head_norms=HeadNormKind.ROTATED,
    )
    return read_decoder(config, "hunyuan", [attention] * config.integer("num_hidden_layers"))


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


HUNYUAN = Family(
    name="hunyuan",
    model_type="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    read=_read,
    names=replace(
        TensorNames(), query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"
    ),
    gguf=GGUFMapping("hunyuan-dense", _gguf, GGUF_NAMES),
)
