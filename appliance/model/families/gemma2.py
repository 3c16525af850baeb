"""Gemma 1 and 2: scaled embeddings and norms about 1; Gemma 2 slides in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import Activation
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
    read_window,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_TANH = "gelu_pytorch_tanh"
_LAYERS_OF_27B = 46


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    rope = read_rope(config, head_dim)
    attention = read_attention(config, rope, head_dim, qkv_bias=bias, output_bias=bias)
    named = config.value("hidden_act")
    # Google's first configs say "gelu" and mean the approximation.
    act = Activation.GELU_TANH if named == "gelu" else read_activation(config)
    mlp = MLPSpec(config.integer("intermediate_size"), act)
    layers = config.integer("num_hidden_layers")
    return read_decoder(
        config,
        "gemma",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def _read_2(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    layers, window = config.integer("num_hidden_layers"), read_window(config)
    slides = read_layer_types(config, [index % 2 == 0 for index in range(layers)])
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    mlp = MLPSpec(
        config.integer("intermediate_size"),
        read_activation(config, "hidden_activation"),
    )
    mixers = [
        read_attention(
            config,
            read_rope(config, head_dim),
            head_dim,
            window=window if sliding else None,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            softcap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=bias,
            output_bias=bias,
        )
        for sliding in slides
    ]
    return read_decoder(
        config,
        "gemma2",
        mixers,
        mlps=[mlp] * layers,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "gemma", lambda meta, file: {"hidden_act": _TANH})


def _gguf_2(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "gemma2", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    heads, hidden_size = meta.integer("attention.head_count"), meta.integer("embedding_length")
    # The file lacks the score scale; it is 1 / sqrt(head_dim) in all sizes but one.
    largest = meta.integer("block_count") == _LAYERS_OF_27B
    head_dim = meta.integer("attention.key_length", hidden_size // heads)
    return {
        "hidden_activation": _TANH,
        "query_pre_attn_scalar": hidden_size // heads if largest else head_dim,
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


GEMMA = Family(
    name="gemma",
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    read=_read,
    gguf=GGUFMapping("gemma", _gguf, GGUF_NAMES, norm_shift=1.0),
)
GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    read=_read_2,
    names=TensorNames(
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    gguf=GGUFMapping("gemma2", _gguf_2, GGUF_NAMES, norm_shift=1.0),
)
