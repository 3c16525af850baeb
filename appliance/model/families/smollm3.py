"""SmolLM 3: Llama in which every fourth layer has no positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_biases, gguf_config
from appliance.model.families.rope import read_rope, without_positions
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

_INTERVAL = 4


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    rope, still = read_rope(config, head_dim), without_positions(head_dim)
    turns = _read_turning(config)
    window = config.value("sliding_window") if config.flag("use_sliding_window") else None
    slides = read_layer_types(config, [window is not None and not turning for turning in turns])
    layers = [
        read_attention(
            config,
            rope if turning else still,
            head_dim,
            window=config.integer("sliding_window") if sliding and window is not None else None,
            qkv_bias=bias,
            output_bias=bias,
        )
        for turning, sliding in zip(turns, slides, strict=True)
    ]
    return read_decoder(config, "smollm3", layers, mlp_bias=config.flag("mlp_bias"))


def _read_turning(config: ConfigReader) -> list[bool]:
    """Read which layers have RoPE, from a list of 1 and 0, or from an interval."""
    layers = config.integer("num_hidden_layers")
    listed = config.value("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or not set(listed) <= {0, 1}:
        raise CheckpointError(
            f"{config.origin}: no_rope_layers must list 1 (with RoPE) or 0 for each layer, "
            f"num_hidden_layers = {layers}, but is {str(listed)[:80]}; take "
            "the config.json of its makers"
        )
    return [bool(turning) for turning in listed[:layers]]


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "smollm3", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "no_rope_layer_interval": _INTERVAL,  # true of all models; the file lacks it
        **gguf_biases(file, attention="attention_bias", mlp="mlp_bias"),
    }


SMOLLM3 = Family(
    name="smollm3",
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    read=_read,
    gguf=GGUFMapping("smollm3", _gguf, GGUF_NAMES, interleaved_rope=True),
)
