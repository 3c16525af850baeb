"""Qwen 2 and 2.5: biases on query, key and value, and optional windows in the upper layers.

MiMo 7B is a Qwen 2 with a draft head, which is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
)

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def read_windows(config: ConfigReader) -> list[int | None]:
    """Read each layer's window from the settings of Qwen 2 and 3."""
    num_layers = config.integer("num_hidden_layers")
    slides = config.flag("use_sliding_window")
    window = config.integer("sliding_window") if slides else config.value("sliding_window")
    first = config.integer("max_window_layers", num_layers)
    kinds = read_layer_types(config, [slides and i >= first for i in range(num_layers)])
    if any(kinds) and not slides:
        raise config.refuse("use_sliding_window", "true where layer_types has sliding_attention")
    return [window if kind else None for kind in kinds]


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    rope = read_rope(config, head_dim)
    layers = [
        read_attention(config, rope, head_dim, window=window, qkv_bias=True)
        for window in read_windows(config)
    ]
    return read_decoder(config, "qwen2", layers)


def _mapping(architecture: str) -> GGUFMapping:
    def config(file: GGUFFile) -> dict[str, Any]:
        return gguf_config(file, architecture, lambda meta, file: {"hidden_act": "silu"})

    return GGUFMapping(architecture, config, GGUF_NAMES)


QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "MiMoForCausalLM"),
    read=_read,
    gguf=_mapping("qwen2"),
)
# The text part of Qwen2-VL and Qwen2.5-VL.
QWEN2_VL = replace(QWEN2, name="qwen2_vl", gguf=_mapping("qwen2vl"))
