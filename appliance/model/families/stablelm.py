"""StableLM: LayerNorm with biases, and only a part of each head rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import read_attention, read_decoder, read_head_dim
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    attention = read_attention(
        config,
        read_rope(config, head_dim, partial=True),
        head_dim,
        qkv_bias=config.flag("use_qkv_bias"),
    )
    decoder = read_decoder(
        config,
        "stablelm",
        [attention] * config.integer("num_hidden_layers"),
        norm=NormSpec(config.number("layer_norm_eps"), centered=True),
    )
    parallel = config.flag("use_parallel_residual")
    made = (replace(layer, parallel=parallel, one_norm=parallel) for layer in decoder.layers)
    return replace(decoder, layers=tuple(made))


def _lacks_head_norms(config: Mapping[str, Any]) -> bool:
    return not config.get("qk_layernorm")


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "stablelm", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    meta.value("use_parallel_residual")  # the norms tell, as in llama.cpp
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="use_qkv_bias"),
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensor_names(),
    }


STABLELM = Family(
    name="stablelm",
    model_type="stablelm",
    architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    read=_read,
    covers=_lacks_head_norms,
    gguf=GGUFMapping("stablelm", _gguf, GGUF_NAMES),
)
