"""OLMo 2 and 3: norms only behind attention and MLP, and of all heads at once.

OLMo 3 slides in three layers of four, whose rotation is never scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.head_norms import HeadNormKind
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_layer_types,
    gguf_rope_scaling,
)
from appliance.model.families.rope import read_rope, scaled_rope, section_of_layers
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
    read_window,
)
from appliance.model.names import TensorNames
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import AttentionSpec, DecoderSpec, RopeSpec

_PERIOD = 4


def _read(config: ConfigReader) -> DecoderSpec:
    rope = read_rope(config, read_head_dim(config))
    layers = [_read_attention(config, rope, None)] * config.integer("num_hidden_layers")
    return _read_decoder(config, "olmo2", layers)


def _read_3(config: ConfigReader) -> DecoderSpec:
    layers = config.integer("num_hidden_layers")
    slides = read_layer_types(config, [(index + 1) % _PERIOD != 0 for index in range(layers)])
    window = read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    local, full = _ropes(config, read_head_dim(config))
    mixers = [
        _read_attention(config, local if sliding else full, window if sliding else None)
        for sliding in slides
    ]
    return _read_decoder(config, "olmo3", mixers)


def _ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Read RoPE of sliding and full layers; old-style scaling applies only to full ones."""
    sections, theta = config.section("rope_parameters"), "rope_theta"
    local = section_of_layers(sections, "sliding_attention")
    full = section_of_layers(sections, "full_attention")
    sections.refuse_unknown(frozenset())
    if config.value("rope_scaling"):
        full = config.section("rope_scaling")
    return scaled_rope(config, local, theta, head_dim), scaled_rope(config, full, theta, head_dim)


def _read_attention(config: ConfigReader, rope: RopeSpec, window: int | None) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return read_attention(
        config,
        rope,
        read_head_dim(config),
        window=window,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
        head_norms=HeadNormKind.ALL,
    )


def _read_decoder(
    config: ConfigReader, architecture: str, mixers: list[AttentionSpec]
) -> DecoderSpec:
    return read_decoder(config, architecture, mixers, post_norms=True, pre_norms=False)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        meta.value("attention.sliding_window")  # 0, else it were OLMo 3
        return {"hidden_act": "silu"} | gguf_biases(file, attention="attention_bias")

    return gguf_config(file, "olmo2", extra)


def _gguf_3(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        theta = {"rope_theta": meta.number("rope.freq_base", 10000.0)}
        full = gguf_rope_scaling(meta) or {"rope_type": "default"}
        return {
            "hidden_act": "silu",
            **gguf_biases(file, attention="attention_bias"),
            "sliding_window": meta.integer("attention.sliding_window"),
            "layer_types": gguf_layer_types(meta, _PERIOD),
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": full | theta,
                "sliding_attention": {"rope_type": "default"} | theta,
            },
        }

    return gguf_config(file, "olmo2", extra)


def _slides(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("attention.sliding_window"))


_NAMES = TensorNames(
    mixer_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)

OLMO2 = Family(
    name="olmo2",
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    read=_read,
    names=_NAMES,
    gguf=GGUFMapping("olmo2", _gguf, GGUF_NAMES),
)
OLMO3 = Family(
    name="olmo3",
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM",),
    read=_read_3,
    names=_NAMES,
    gguf=GGUFMapping("olmo2", _gguf_3, GGUF_NAMES, is_of=_slides),
)
