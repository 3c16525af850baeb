"""GLM-4 and GLM-4-0414: half of a head rotates, by neighbours; the newer ones norm four times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.names import TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    return _read_decoder(config, "glm", post_norms=False)


def _read_4(config: ConfigReader) -> DecoderSpec:
    return _read_decoder(config, "glm4", post_norms=True)


def _read_decoder(config: ConfigReader, architecture: str, *, post_norms: bool) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=config.flag("attention_bias"),
    )
    layers = [attention] * config.integer("num_hidden_layers")
    return read_decoder(config, architecture, layers, post_norms=post_norms)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "chatglm", _gguf_extra)


def _gguf_4(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        if meta.value("rope.dimension_sections") is not None:
            raise meta.refuse("rope.dimension_sections", "only text, so none; use the folder")
        return _gguf_extra(meta, file)

    return gguf_config(file, "glm4", extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
    }


_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",), rotated_pairs=True)
_GGUF_NAMES = replace(GGUF_NAMES, gate_up=("ffn_up",), rotated_pairs=True)

GLM = Family(
    name="glm",
    model_type="glm",
    architectures=("GlmForCausalLM",),
    read=_read,
    names=_NAMES,
    gguf=GGUFMapping("chatglm", _gguf, _GGUF_NAMES),
)
GLM4 = Family(
    name="glm4",
    model_type="glm4",
    architectures=("Glm4ForCausalLM",),
    read=_read_4,
    names=replace(
        _NAMES,
        mixer_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    ),
    gguf=GGUFMapping("glm4", _gguf_4, _GGUF_NAMES),
)
