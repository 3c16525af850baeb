"""Gemma 3, text only.

Five layers with a window and their own RoPE base alternate with one without; norms before and after
attention and MLP store their weights minus 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_layer_types,
)
from appliance.model.families.rope import scaled_rope, section_of_layers
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
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, RopeSpec

_LAYERS_OF_27B = 62
_PERIOD = 6


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    num_layers = config.integer("num_hidden_layers")
    listed = config.is_given("layer_types")
    pattern = num_layers if listed else config.integer("sliding_window_pattern")
    slides = read_layer_types(config, [(i + 1) % pattern != 0 for i in range(num_layers)])
    window = read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    bias = config.flag("attention_bias")
    local, full = _ropes(config, head_dim)
    layers = [
        read_attention(
            config,
            local if sliding else full,
            head_dim,
            window=window if sliding else None,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            softcap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=NormSpec(config.number("rms_norm_eps"), offset=1.0),
        )
        for sliding in slides
    ]
    return read_decoder(
        config,
        "gemma3",
        layers,
        activation="hidden_activation",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def _ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Read RoPE of sliding and full layers; old-style scaling applies only to full ones."""
    sections = config.section("rope_parameters")
    local = section_of_layers(sections, "sliding_attention")
    full = section_of_layers(sections, "full_attention")
    sections.refuse_unknown(frozenset())
    if config.value("rope_scaling"):
        full = config.section("rope_scaling")
    return (
        scaled_rope(config, local, "rope_local_base_freq", head_dim),
        scaled_rope(config, full, "rope_theta", head_dim),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "gemma3", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    num_heads, hidden_size = meta.integer("attention.head_count"), meta.integer("embedding_length")
    # The file lacks the score scale; it is 1 / sqrt(head_dim) in all sizes but one.
    largest = meta.integer("block_count") == _LAYERS_OF_27B
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **gguf_biases(file, attention="attention_bias"),
        "query_pre_attn_scalar": hidden_size // num_heads if largest else head_dim,
        "rope_parameters": None,  # two sets, by the keys below
        **_windows(meta),
        "rope_theta": meta.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": meta.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
    }


def _windows(meta: ConfigReader) -> dict[str, Any]:
    """Read the window and the layers that have it; without a window none has."""
    if meta.value("attention.sliding_window") is None:
        return {"sliding_window": None, "sliding_window_pattern": 1}
    window = meta.integer("attention.sliding_window")
    return {"sliding_window": window, "layer_types": gguf_layer_types(meta, _PERIOD)}


GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    read=_read,
    names=TensorNames(
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    gguf=GGUFMapping("gemma3", _gguf, GGUF_NAMES, norm_shift=1.0, two_way=("gemma-embedding",)),
)
