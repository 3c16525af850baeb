"""MiniCPM 1, 2 and 4, and MiniCPM 3, whose attention is latent: multipliers, as Granite has them.

transformers has no class of the former: their defaults and arithmetic are those of the code that
its maker publishes beside the weights, which is never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_latent,
    num_layers,
)
from appliance.model.families.mixers import read_latent_attention
from appliance.model.families.reader import ClassDefaults
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    with_multipliers,
)

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

# Multipliers of all published models, which older GGUF files do not have.
_EMBEDDING, _DEPTH, _BASE_WIDTH = 12.0, 1.4, 256


def _read(config: ConfigReader) -> DecoderSpec:
    if config.value("sparse_config") is not None:
        raise config.refuse("sparse_config", "null, with which all positions are read")
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    attention = read_attention(
        config,
        read_rope(config, head_dim),
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
    )
    spec = read_decoder(config, "minicpm", [attention] * config.integer("num_hidden_layers"))
    return _with_multipliers(config, spec)


def _read_3(config: ConfigReader) -> DecoderSpec:
    attention = read_latent_attention(
        config,
        read_rope(config, config.integer("qk_rope_head_dim")),
        interleaved=False,
    )
    spec = read_decoder(
        config,
        "minicpm3",
        [attention] * config.integer("num_hidden_layers"),
        mlp_bias=config.flag("mlp_bias"),
    )
    return _with_multipliers(config, spec)


def _with_multipliers(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    root = len(spec.layers) ** 0.5
    return with_multipliers(
        spec,
        added=config.number("scale_depth", root) / root,
        embedding=config.number("scale_emb"),
        logits=config.integer("dim_model_base", spec.hidden_size) / spec.hidden_size,
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "minicpm", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    root, hidden = num_layers(meta) ** 0.5, meta.integer("embedding_length")
    logits = meta.number("logit_scale", hidden / _BASE_WIDTH)
    meta.value("rope.scaling.finetuned")  # without effect here, unlike for Granite
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
        "scale_emb": meta.number("embedding_scale", _EMBEDDING),
        "scale_depth": meta.number("residual_scale", _DEPTH / root) * root,
        "dim_model_base": round(hidden / logits),
    }


def _gguf_3(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "minicpm3", _gguf_extra_3)


def _gguf_extra_3(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "scale_emb": _EMBEDDING,
        "scale_depth": _DEPTH,
        "dim_model_base": _BASE_WIDTH,
    } | gguf_latent(meta, meta.integer("embedding_length") // meta.integer("attention.head_count"))


MINICPM = Family(
    name="minicpm",
    model_type="minicpm",
    architectures=("MiniCPMForCausalLM",),
    read=_read,
    gguf=GGUFMapping("minicpm", _gguf, GGUF_NAMES, interleaved_rope=True),
    defaults=ClassDefaults(
        values={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "scale_emb": 1,
            "scale_depth": 1,
            "dim_model_base": 1,
        },
        known=frozenset({"num_experts", "num_key_value_heads", "rope_scaling", "sparse_config"}),
    ),
)
MINICPM3 = Family(
    name="minicpm3",
    model_type="minicpm3",
    architectures=("MiniCPM3ForCausalLM",),
    read=_read_3,
    gguf=GGUFMapping("minicpm3", _gguf_3, GGUF_NAMES),
)
