"""EXAONE 4: norms only behind attention and MLP; layers that see everything have no positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_layer_types
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
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_PERIOD = 4
_LAYERS_OF_32B = 64  # the size whose files may lack the window
_WINDOW = 4096


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, layers = read_head_dim(config), config.integer("num_hidden_layers")
    window, usual = _read_window(config), [False] * layers
    if not config.is_given("layer_types"):
        period = config.integer("sliding_window_pattern")
        usual = [(index + 1) % period != 0 for index in range(layers)]
    slides = read_layer_types(config, usual)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    rope, still = read_rope(config, head_dim), without_positions(head_dim)
    mixers = [
        read_attention(
            config,
            rope if sliding or window is None else still,
            head_dim,
            window=window if sliding else None,
            qk_norm=NormSpec(config.number("rms_norm_eps")),
        )
        for sliding in slides
    ]
    return read_decoder(config, "exaone4", mixers, post_norms=True, pre_norms=False)


def _read_window(config: ConfigReader) -> int | None:
    """Read the window; only with a list of layers it may be null, as in 1.2B."""
    has_null = "sliding_window" in config and not config.is_given("sliding_window")
    return None if has_null and config.is_given("layer_types") else read_window(config)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "exaone4", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    kinds = gguf_layer_types(meta, _PERIOD)
    window = meta.value("attention.sliding_window") or None
    if window is None and len(kinds) == _LAYERS_OF_32B:
        window = _WINDOW
    return {
        "hidden_act": "silu",
        "sliding_window": window,
        "layer_types": ["full_attention"] * len(kinds) if window is None else kinds,
    }


EXAONE4 = Family(
    name="exaone4",
    model_type="exaone4",
    architectures=("Exaone4ForCausalLM",),
    read=_read,
    names=TensorNames(
        mixer_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
    ),
    gguf=GGUFMapping("exaone4", _gguf, GGUF_NAMES),
)
