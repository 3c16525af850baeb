"""Qwen 3: Qwen 2 with norms of query and key heads instead of biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.qwen2 import read_windows
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import AttentionSpec, DecoderSpec


def read_qwen3_attention(
    config: ConfigReader, head_dim: int, windows: Sequence[int | None]
) -> list[AttentionSpec]:
    """Read the attention of layers with these windows."""
    rope = read_rope(config, head_dim)
    bias = config.flag("attention_bias")
    qk_norm = NormSpec(config.number("rms_norm_eps"))
    return [
        read_attention(
            config,
            rope,
            head_dim,
            window=window,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
        )
        for window in windows
    ]


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    layers = read_qwen3_attention(config, head_dim, read_windows(config))
    return read_decoder(config, "qwen3", layers)


def _mapping(architecture: str) -> GGUFMapping:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return {"hidden_act": "silu"} | gguf_biases(file, attention="attention_bias")

    return GGUFMapping(
        architecture, lambda file: gguf_config(file, architecture, extra), GGUF_NAMES
    )


QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    read=_read,
    gguf=_mapping("qwen3"),
)
# The text part of Qwen3-VL.
QWEN3_VL = replace(QWEN3, name="qwen3_vl", gguf=_mapping("qwen3vl"))
