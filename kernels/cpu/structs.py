"""The structs of the C ABI that describe a model, as in src/appliance_cpu.h and its parts.

Imports nothing of ours.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

ABI = 28  # AP_ABI
LANES = 16  # AP_LANES


class Status(IntEnum):
    """ap_status."""

    OK = 0
    NO_MEMORY = 1
    BAD_ARGUMENT = 2
    UNSUPPORTED_ISA = 3
    RANK_LOST = 4


class Isa(IntEnum):
    """ap_isa, from the slowest to the fastest of each processor."""

    SCALAR = 0
    AVX2 = 1
    AVXVNNI = 2
    AVX512 = 3
    AMX = 4
    NEON = 5
    I8MM = 6


class Format(IntEnum):
    """ap_format."""

    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    SEALED = 5
    FP8 = 6
    K8V4 = 7
    E2M1 = 8
    INT2 = 9
    INT3 = 10
    INT5 = 11
    INT6 = 12
    IQ4 = 13
    IQ3_S = 14
    IQ3_XXS = 15
    IQ2 = 16
    IQ1 = 17


class ScaleFormat(IntEnum):
    """ap_scale_format: the values that are no `Format`."""

    NONE = 31
    E8M0 = 32
    Q2_K = 33
    Q3_K = 34
    Q4_K = 35
    Q6_K = 36
    IQ4_XS = 37
    TRELLIS = 38
    ODD_32 = 39
    ODD_16 = 40


class Offset(IntEnum):
    """ap_offset_kind."""

    CENTERED = 0
    ADDITIVE = 1
    ZERO_POINT = 2


class LinearStruct(Structure):
    """ap_linear."""

    _fields_ = (
        ("format", c_int32),
        ("offset_kind", c_int32),
        ("scale_format", c_int32),
        ("group", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
        ("input_order", c_void_p),
        ("bounds", c_void_p),
    )


class NormStruct(Structure):
    """ap_norm."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("bias", c_void_p))


class RopeStruct(Structure):
    """ap_rope."""

    _fields_ = (
        ("rotary_dim", c_int32),
        ("amplitude", c_float),
        ("frequencies", c_void_p),
        ("query_beta", c_float),
        ("original_context", c_int32),
        ("query_shift", c_int32),
        ("reserved", c_int32),
        ("axes", c_void_p),
    )


class HeadNormsCode(IntEnum):
    """ap_head_norms."""

    EACH = 0
    ALL = 1
    ROTATED = 2


class OutputGateCode(IntEnum):
    """ap_output_gate."""

    NONE = 0
    ELEMENTS = 1
    HEADS = 2


class AttentionStruct(Structure):
    """ap_attention."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("chunk", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("rope", c_int32),
        ("num_qkv", c_int32),
        ("output_gate", c_int32),
        ("qkv", LinearStruct * 4),
        ("output", LinearStruct),
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
        ("value_norm", NormStruct),
        ("sinks", c_void_p),
        ("only_reads", c_int32),
        ("keys_are_values", c_int32),
        ("looks_ahead", c_int32),
        ("head_norms", c_int32),
        ("sees_picture", c_int32),
        ("reserved", c_int32),
    )


class LatentStruct(Structure):
    """ap_latent."""

    _fields_ = (
        ("latent", c_int32),
        ("plain_dim", c_int32),
        ("value_dim", c_int32),
        ("reserved", c_int32),
        ("query_norm", NormStruct),
        ("queries", LinearStruct),
        ("norm", NormStruct),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class FiltersStruct(Structure):
    """ap_filters."""

    _fields_ = (
        ("width", c_int32),
        ("taps", c_int32),
        ("filters", c_void_p),
        ("bias", c_void_p),
        ("state", c_int64),
    )


class ShortConvStruct(Structure):
    """ap_short_conv."""

    _fields_ = (("filters", FiltersStruct), ("input", LinearStruct), ("output", LinearStruct))


class GatedDeltaStruct(Structure):
    """ap_gated_delta."""

    _fields_ = (
        ("num_key_heads", c_int32),
        ("num_value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("num_inputs", c_int32),
        ("filters", FiltersStruct),
        ("inputs", LinearStruct * 4),
        ("output", LinearStruct),
        ("norm", NormStruct),
        ("rates", c_void_p),
        ("decay_bias", c_void_p),
        ("state", c_int64),
    )


class Mamba2Struct(Structure):
    """ap_mamba2."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_groups", c_int32),
        ("head_dim", c_int32),
        ("state_dim", c_int32),
        ("split_groups", c_int32),
        ("split_group", c_int32),
        ("split_width", c_int32),
        ("filters", FiltersStruct),
        ("input", LinearStruct),
        ("output", LinearStruct),
        ("norm", NormStruct),
        ("step_bias", c_void_p),
        ("rates", c_void_p),
        ("skip", c_void_p),
        ("state", c_int64),
    )


class ScoringCode(IntEnum):
    """ap_scoring."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


class RouterStruct(Structure):
    """ap_router."""

    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("renormalize", c_int32),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("best_of_group", c_int32),
        ("scale", c_float),
        ("epsilon", c_float),
        ("selection_bias", c_void_p),
        ("expert_scale", c_void_p),
    )


class ExpertsStruct(Structure):
    """ap_experts."""

    _fields_ = (
        ("router", RouterStruct),
        ("logits", LinearStruct),
        ("shared_gate", LinearStruct),
        ("first_expert", c_int32),
        ("num_here", c_int32),
        ("weighs_inputs", c_int32),
        ("reserved", c_int32),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("router_norm", NormStruct),
        ("input_norm", NormStruct),
        ("shared_norm", NormStruct),
        ("output_norm", NormStruct),
        ("into_latent", LinearStruct),
        ("out_of_latent", LinearStruct),
    )


class GatingStruct(Structure):
    """ap_gating."""

    _fields_ = (("activation", c_int32), ("limit", c_float), ("alpha", c_float))


class RoutedStruct(Structure):
    """ap_routed."""

    _fields_ = (
        ("rows", c_int32),
        ("hidden", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
    )


class TokenInputStruct(Structure):
    """ap_token_input."""

    _fields_ = (("gate", LinearStruct), ("up", LinearStruct), ("norm", NormStruct))


class TokenInputsStruct(Structure):
    """ap_token_inputs."""

    _fields_ = (
        ("width", c_int32),
        ("activation", c_int32),
        ("embedding", LinearStruct),
        ("projection", LinearStruct),
        ("norm", NormStruct),
        ("embedding_scale", c_float),
        ("projection_scale", c_float),
        ("scale", c_float),
        ("reserved", c_int32),
    )


class LayerStruct(Structure):
    """ap_layer."""

    _fields_ = (
        ("attention", AttentionStruct),
        ("latent", c_void_p),
        ("short_conv", c_void_p),
        ("gated_delta", c_void_p),
        ("mamba2", c_void_p),
        ("experts", c_void_p),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("gating", GatingStruct),
        ("expert_gating", GatingStruct),
        ("cache_layer", c_int32),
        ("mixer_norm", NormStruct),
        ("mixer_post_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("mlp_post_norm", NormStruct),
        ("token_input", TokenInputStruct),
        ("output_scale", c_float),
        ("is_parallel", c_int32),
        ("mixer_is_part", c_int32),
        ("mlp_is_part", c_int32),
    )


class JoinStruct(Structure):
    """ap_join."""

    _fields_ = (
        ("token_norm", NormStruct),
        ("hidden_norm", NormStruct),
        ("linear", LinearStruct),
        ("stream_is_normed", c_int32),
        ("reserved", c_int32),
    )


class ModelStruct(Structure):
    """ap_model."""

    _fields_ = (
        ("hidden_size", c_int32),
        ("vocab_size", c_int32),
        ("num_layers", c_int32),
        ("num_ropes", c_int32),
        ("layers", POINTER(LayerStruct)),
        ("ropes", POINTER(RopeStruct)),
        ("final_norm", NormStruct),
        ("embedding", LinearStruct),
        ("head", LinearStruct),
        ("embedding_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("token_inputs", TokenInputsStruct),
        ("positions", LinearStruct),
        ("first_tokens", c_void_p),
        ("first_token", c_int32),
        ("widest_vocab", c_int32),
        ("norms_replace", c_int32),
        ("join", JoinStruct),
    )


MODEL_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ap_linear": LinearStruct,
    "ap_norm": NormStruct,
    "ap_rope": RopeStruct,
    "ap_attention": AttentionStruct,
    "ap_router": RouterStruct,
    "ap_experts": ExpertsStruct,
    "ap_gating": GatingStruct,
    "ap_routed": RoutedStruct,
    "ap_token_input": TokenInputStruct,
    "ap_token_inputs": TokenInputsStruct,
    "ap_filters": FiltersStruct,
    "ap_short_conv": ShortConvStruct,
    "ap_gated_delta": GatedDeltaStruct,
    "ap_mamba2": Mamba2Struct,
    "ap_latent": LatentStruct,
    "ap_layer": LayerStruct,
    "ap_join": JoinStruct,
    "ap_model": ModelStruct,
}
