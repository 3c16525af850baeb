"""GPT-NeoX and Pythia: LayerNorm before attention and MLP, which may be side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import rope_section, scaled_rope
from appliance.model.families.standard import (
    read_activation,
    read_attention,
    read_decoder,
    read_head_dim,
)
from appliance.model.names import TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, RopeSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        _read_rope(config, head_dim),
        head_dim,
        num_kv_heads=config.integer("num_attention_heads"),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = MLPSpec(
        config.integer("intermediate_size"),
        read_activation(config, gated=False),
        bias=True,
        gated=False,
    )
    layers = config.integer("num_hidden_layers")
    decoder = read_decoder(
        config,
        "gpt_neox",
        [attention] * layers,
        mlps=[mlp] * layers,
        norm=NormSpec(config.number("layer_norm_eps"), centered=True),
    )
    parallel = config.flag("use_parallel_residual")
    return replace(
        decoder, layers=tuple(replace(layer, parallel=parallel) for layer in decoder.layers)
    )


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the rotary settings, which have names of their own outside their section."""
    section = rope_section(config)
    share = 1.0 if "partial_rotary_factor" in section else config.number("rotary_pct")
    return scaled_rope(config, section, "rotary_emb_base", head_dim, partial=True, share=share)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "gptneox", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    width = meta.integer("embedding_length") // meta.integer("attention.head_count")
    return {
        "hidden_act": "gelu",
        "rotary_emb_base": meta.number("rope.freq_base", 10000.0),
        "rotary_pct": meta.integer("rope.dimension_count") / width,
        **gguf_biases(file, attention="attention_bias"),
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": meta.flag("use_parallel_residual"),
    }


GPT_NEOX = Family(
    name="gpt_neox",
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    read=_read,
    names=TensorNames(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{}.",
        qkv=("attention.query_key_value",),
        qkv_by_key_head=True,
        output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    gguf=GGUFMapping("gptneox", _gguf, replace(GGUF_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",))),
)
