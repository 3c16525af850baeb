"""Granite 3 and 4: multipliers everywhere; Mamba-2 in most layers, experts beside a shared MLP.

A multiplier m of what layers add to the stream x needs no operation of its own: x / m is a stream
to which they add without it, and norms of it are the same where their eps is divided by m^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family
from appliance.model.families.mamba2 import ATTENTION_NAMES, RECURRENT_NAMES, read_mamba2
from appliance.model.families.rope import read_rope, without_positions
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
)
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import (
        AttentionSpec,
        DecoderSpec,
        ExpertsSpec,
        MixerSpec,
        NormSpec,
        RopeSpec,
    )


def _read(config: ConfigReader) -> DecoderSpec:
    mixers = [_read_attention(config, _read_rope(config))] * config.integer("num_hidden_layers")
    spec = read_decoder(config, "granite", mixers, mlp_bias=config.flag("mlp_bias"))
    return _with_multipliers(config, spec)


def _read_moe(config: ConfigReader) -> DecoderSpec:
    mixers = [_read_attention(config, _read_rope(config))] * config.integer("num_hidden_layers")
    experts = [_read_experts(config)] * len(mixers)
    return _with_multipliers(config, read_decoder(config, "granitemoe", mixers, experts=experts))


def _read_hybrid(config: ConfigReader) -> DecoderSpec:
    shared = config.integer("shared_intermediate_size")
    mixers = _read_mixers(config)
    has_experts = config.value("num_local_experts", 0) != 0
    spec = read_decoder(
        config,
        "granitemoehybrid",
        mixers,
        width=shared,
        experts=[_read_experts(config)] * len(mixers) if has_experts else (),
    )
    return _with_multipliers(config, spec)


def _read_mixers(config: ConfigReader) -> list[MixerSpec]:
    kind = config.value("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.refuse("position_embedding_type", "rope and nope")
    rope = _read_rope(config) if kind == "rope" else without_positions(read_head_dim(config))
    attention, layers = _read_attention(config, rope), config.integer("num_hidden_layers")
    names = dict.fromkeys(ATTENTION_NAMES, True) | dict.fromkeys(RECURRENT_NAMES, False)
    attends = read_layer_kinds(config, names, layers) or [False] * layers
    if all(attends):
        return [attention] * layers
    mamba2 = read_mamba2(config)
    return [attention if attending else mamba2 for attending in attends]


def _read_rope(config: ConfigReader) -> RopeSpec:
    return read_rope(config, read_head_dim(config))


def _read_attention(config: ConfigReader, rope: RopeSpec) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return read_attention(
        config,
        rope,
        read_head_dim(config),
        scale=config.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_experts(config: ConfigReader) -> ExpertsSpec:
    return read_experts(
        config,
        count="num_local_experts",
        width="intermediate_size",
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        renormalize=False,
        shared_width=config.integer("shared_intermediate_size", 0),
    )


def _with_multipliers(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    added = config.number("residual_multiplier", 1.0)

    def of_stream(norm: NormSpec) -> NormSpec:
        return replace(norm, eps=norm.eps / added**2)

    return replace(
        spec,
        layers=tuple(replace(layer, norm=of_stream(layer.norm)) for layer in spec.layers),
        final_norm=of_stream(spec.final_norm),
        embedding_scale=config.number("embedding_multiplier", 1.0) / added,
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


_NAMES = TensorNames(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        gate_up=("block_sparse_moe.experts.{}.gate_proj", "block_sparse_moe.experts.{}.up_proj"),
        down="block_sparse_moe.experts.{}.down_proj",
        shared_gate_up=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
        stacked_gate_up="block_sparse_moe.input_linear.weight",
        stacked_down="block_sparse_moe.output_linear.weight",
    ),
)

GRANITE = Family(
    name="granite", model_type="granite", architectures=("GraniteForCausalLM",), read=_read
)
GRANITE_MOE = Family(
    name="granitemoe",
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    read=_read_moe,
    names=_NAMES,
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    read=_read_hybrid,
    names=_NAMES,
)
