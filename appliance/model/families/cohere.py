"""Cohere's Command R, R7B and A, and Aya: attention and MLP in parallel after one LayerNorm.

Their norms have no bias and neighbouring elements of a head rotate together. The newer ones (Cohere
2) slide in three layers of four; the fourth sees everything and has no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_layer_types,
)
from appliance.model.families.rope import read_rope, without_positions
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
    from appliance.model.spec import DecoderSpec, RopeSpec

_PERIOD = 4  # for configs without one
_MOST_LAYERS = 64  # from which on files of Command R+ have norms of heads


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, layers = read_head_dim(config), config.integer("num_hidden_layers")
    rope = read_rope(config, head_dim)
    return _read_decoder(config, "cohere", head_dim, [(rope, None)] * layers)


def _read_2(config: ConfigReader) -> DecoderSpec:
    head_dim, layers = _head_dim_2(config), config.integer("num_hidden_layers")
    listed = config.is_given("layer_types")
    period = layers if listed else config.integer("sliding_window_pattern")
    slides = read_layer_types(config, [(index + 1) % period != 0 for index in range(layers)])
    window = read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    local, full = (read_rope(config, head_dim), window), (without_positions(head_dim), None)
    return _read_decoder(
        config, "cohere2", head_dim, [local if sliding else full for sliding in slides]
    )


def _head_dim_2(config: ConfigReader) -> int:
    """Return hidden size divided by heads; `head_dim` is without effect."""
    config.value("head_dim")
    hidden = config.integer("hidden_size")
    if not (head_dim := hidden // config.integer("num_attention_heads")):
        raise config.refuse("num_attention_heads", f"at most hidden_size, which is {hidden}")
    return head_dim


def _read_decoder(
    config: ConfigReader,
    architecture: str,
    head_dim: int,
    kinds: list[tuple[RopeSpec, int | None]],
) -> DecoderSpec:
    bias = config.flag("attention_bias")
    mixers = [
        read_attention(config, rope, head_dim, window=window, qkv_bias=bias, output_bias=bias)
        for rope, window in kinds
    ]
    decoder = read_decoder(
        config,
        architecture,
        mixers,
        norm=NormSpec(config.number("layer_norm_eps"), centered=True, bias=False),
        logit_scale=config.number("logit_scale"),
    )
    made = (replace(layer, parallel=True, one_norm=True) for layer in decoder.layers)
    return replace(decoder, layers=tuple(made))


def _lacks_head_norms(config: Mapping[str, Any]) -> bool:
    return not config.get("use_qk_norm")


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        if meta.integer("block_count") >= _MOST_LAYERS:
            raise meta.refuse("block_count", "fewer layers: those of Command R+ norm their heads")
        return _gguf_extra(meta, file)

    return gguf_config(file, "command-r", extra)


def _gguf_2(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return _gguf_extra(meta, file) | {
            "sliding_window": meta.integer("attention.sliding_window"),
            "layer_types": gguf_layer_types(meta, _PERIOD),
        }

    return gguf_config(file, "cohere2", extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "logit_scale": meta.number("logit_scale", 1.0),
    }


_NAMES = TensorNames(rotated_pairs=True)
_GGUF_NAMES = replace(GGUF_NAMES, rotated_pairs=True)

COHERE = Family(
    name="cohere",
    model_type="cohere",
    architectures=("CohereForCausalLM",),
    read=_read,
    names=_NAMES,
    covers=_lacks_head_norms,
    gguf=GGUFMapping("command-r", _gguf, _GGUF_NAMES),
)
COHERE2 = Family(
    name="cohere2",
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM",),
    read=_read_2,
    names=_NAMES,
    gguf=GGUFMapping("cohere2", _gguf_2, _GGUF_NAMES),
)
