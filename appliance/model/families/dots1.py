"""dots.llm1: heads normed as Qwen3's, experts chosen and shared as GLM-4.5's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
)
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
    read_window,
)
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec

_EPSILON = 1e-20  # of its router, in transformers
_SIGMOID = 2  # `expert_gating_func` of GGUF


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim, bias = read_head_dim(config), config.flag("attention_bias")
    layers, window = config.integer("num_hidden_layers"), read_window(config)
    slides = read_layer_types(config, _upper_layers(config, layers, window))
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number where layer_types has sliding_attention")
    rope = read_rope(config, head_dim)
    mixers = [
        read_attention(
            config,
            rope,
            head_dim,
            window=window if sliding else None,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=NormSpec(config.number("rms_norm_eps")),
        )
        for sliding in slides
    ]
    dense = config.integer("first_k_dense_replace", 0)
    shared = config.integer("n_shared_experts") * config.integer("moe_intermediate_size")
    experts = read_experts(
        config,
        count="n_routed_experts",
        scoring=Scoring.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        selection_bias=True,
        grouped=True,
        epsilon=_EPSILON,
        shared_width=shared,
    )
    return read_decoder(
        config,
        "dots1",
        mixers,
        experts=[None if index < dense else experts for index in range(layers)],
    )


def _upper_layers(config: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Return which layers slide if no list says it: those from `max_window_layers` on."""
    if window is None or config.is_given("layer_types"):
        return [False] * layers
    first = config.integer("max_window_layers")
    return [index >= first for index in range(layers)]


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "dots1", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise meta.refuse("expert_gating_func", f"{_SIGMOID} with this architecture")
    return {
        "hidden_act": "silu",
        "sliding_window": None,
        **gguf_biases(file, attention="attention_bias"),
        "n_shared_experts": meta.integer("expert_shared_count"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
    } | gguf_experts(meta, "n_routed_experts")


DOTS1 = Family(
    name="dots1",
    model_type="dots1",
    architectures=("Dots1ForCausalLM",),
    read=_read,
    names=TensorNames(
        experts=ExpertNames(
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        )
    ),
    gguf=GGUFMapping("dots1", _gguf, GGUF_NAMES),
)
