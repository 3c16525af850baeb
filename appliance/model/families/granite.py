"""Granite 3 and 4: multipliers everywhere; in hybrids Mamba-2 in most layers, and a shared MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
    kv_heads,
    num_layers,
)
from appliance.model.families.mixers import (
    ATTENTION_NAMES,
    RECURRENT_NAMES,
    gguf_mamba2_settings,
    read_mamba2,
)
from appliance.model.families.rope import read_rope, rope_section, without_positions
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
    with_multipliers,
)
from appliance.model.names import ExpertNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import (
        AttentionSpec,
        DecoderSpec,
        ExpertsSpec,
        MixerSpec,
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
    has_experts = config.value("num_local_experts") != 0
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
    rope_section(config)  # checked without positions too
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
        scale=config.optional_number("attention_multiplier"),
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
    return with_multipliers(
        spec,
        added=config.number("residual_multiplier"),
        embedding=config.number("embedding_multiplier"),
        logits=1.0 / config.number("logits_scaling"),
    )


def _gguf(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return _gguf_turning(meta, file) | gguf_biases(file, mlp="mlp_bias")

    return gguf_config(file, "granite", extra)


def _gguf_moe(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        return _gguf_turning(meta, file) | _gguf_experts(meta)

    return gguf_config(file, "granitemoe", extra)


def _gguf_hybrid(file: GGUFFile) -> dict[str, Any]:
    def extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
        heads = kv_heads(meta, meta.integer("attention.head_count"))
        kinds = ["attention" if count else "mamba" for count in heads]
        kinds *= num_layers(meta) if len(kinds) == 1 else 1
        found = _gguf_extra(meta, file) | _gguf_experts(meta)
        turns = meta.flag("rope.scaling.finetuned", True)
        found |= {"layer_types": kinds, "position_embedding_type": "rope" if turns else "nope"}
        if "mamba" not in kinds:
            return found
        return found | gguf_mamba2_settings(meta, file, kinds.index("mamba"))

    return gguf_config(file, "granitehybrid", extra)


_OF_MAMBA2 = tuple(
    f"ssm.{key}"
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def _gguf_turning(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if not meta.flag("rope.scaling.finetuned", True):
        raise meta.refuse("rope.scaling.finetuned", "true with this architecture")
    return _gguf_extra(meta, file)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    if meta.value("expert_count", 0) == 0:
        meta.value("expert_shared_feed_forward_length")  # the MLP's own width once more
    for key in _OF_MAMBA2:  # also in files of Granite 4 that have no such layer
        meta.value(key)
    width = meta.integer("embedding_length") // meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", width)
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias"),
        "attention_multiplier": meta.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "logits_scaling": meta.number("logit_scale", 1.0),
    }


def _gguf_experts(meta: ConfigReader) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"
    config: dict[str, Any] = {"num_local_experts": 0}
    if meta.value("expert_count"):
        config = gguf_experts(meta, "num_local_experts")
        if (width := config.pop("moe_intermediate_size", None)) is not None:
            config["intermediate_size"] = width
    if meta.value(shared) is not None:
        config["shared_intermediate_size"] = meta.integer(shared)
    return config


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

# GGUF files store gate and up of the shared MLP separately.
_APART = ("shared_mlp.gate_linear", "shared_mlp.up_linear")
_OWN_NAMES = replace(_NAMES, gate_up=_APART, experts=replace(_NAMES.experts, shared_gate_up=_APART))

GRANITE = Family(
    name="granite",
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    read=_read,
    gguf=GGUFMapping("granite", _gguf, GGUF_NAMES, interleaved_rope=True),
)
GRANITE_MOE = Family(
    name="granitemoe",
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    read=_read_moe,
    names=_NAMES,
    gguf=GGUFMapping(
        "granitemoe", _gguf_moe, GGUF_NAMES, interleaved_rope=True, own_names=_OWN_NAMES
    ),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    read=_read_hybrid,
    names=_NAMES,
    gguf=GGUFMapping(
        "granitehybrid", _gguf_hybrid, GGUF_NAMES, interleaved_rope=True, own_names=_OWN_NAMES
    ),
)
