"""gpt-oss: attention sinks, a window in every other layer, clamped SwiGLU in all experts.

Its checkpoints store experts in MXFP4, with alternating gate and up rows. Unpacked ones store them
in 16 bits, inputs first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.activation import ClampedSwiGLU
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import GGUF_NAMES, gguf_config, gguf_experts
from appliance.model.families.rope import read_rope
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_types,
    read_window,
)
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    rope = read_rope(config, head_dim)
    num_layers = config.integer("num_hidden_layers")
    slides = read_layer_types(config, [index % 2 == 0 for index in range(num_layers)])
    window = read_window(config)
    if any(slides) and window is None:
        raise config.refuse("sliding_window", "a number, as layers slide")
    bias = config.flag("attention_bias")
    experts = read_experts(
        config,
        count="num_local_experts",
        width="intermediate_size",
        gating=ClampedSwiGLU(
            limit=config.number("swiglu_limit"), alpha=config.number("swiglu_alpha")
        ),
        bias=True,
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        renormalize=False,
    )
    attention = [
        read_attention(
            config,
            rope,
            head_dim,
            window=window if sliding else None,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
        )
        for sliding in slides
    ]
    return read_decoder(config, "gpt_oss", attention, experts=[experts] * num_layers)


def _gguf(file: GGUFFile) -> dict[str, Any]:
    config = gguf_config(file, "gpt-oss", _gguf_extra)
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False  # true of all models; the file lacks it
    return config


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    experts = gguf_experts(meta, "num_local_experts")
    if meta.value("attention.sliding_window_pattern", 2) != 2:
        raise meta.refuse("attention.sliding_window_pattern", "2 with this architecture")
    width = experts.pop("moe_intermediate_size", meta.integer("feed_forward_length"))
    return {
        "hidden_act": "silu",
        "intermediate_size": width,
        "sliding_window": meta.integer("attention.sliding_window"),
    } | experts


GPT_OSS = Family(
    name="gpt_oss",
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    read=_read,
    names=TensorNames(
        experts=ExpertNames(router="mlp.router", takes_turns=True, transposed=True),
    ),
    gguf=GGUFMapping("gpt-oss", _gguf, replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
)
