"""The structs of the C ABI, field by field as in src/appliance_cpu.h. Imports nothing of ours."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

ABI = 4  # AP_ABI
LANES = 16  # AP_LANES


class Status(IntEnum):
    """ap_status."""

    OK = 0
    NO_MEMORY = 1
    BAD_ARGUMENT = 2
    UNSUPPORTED_ISA = 3


class Isa(IntEnum):
    """ap_isa, from the slowest to the fastest."""

    SCALAR = 0
    AVX2 = 1
    AVXVNNI = 2
    AVX512 = 3


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
    )


class NormStruct(Structure):
    """ap_norm."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))


class RopeStruct(Structure):
    """ap_rope."""

    _fields_ = (("rotary_dim", c_int32), ("amplitude", c_float), ("frequencies", c_void_p))


class AttentionStruct(Structure):
    """ap_attention."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("rope", c_int32),
        ("num_qkv", c_int32),
        ("qkv", LinearStruct * 3),
        ("output", LinearStruct),
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
    )


class LayerStruct(Structure):
    """ap_layer."""

    _fields_ = (
        ("attention", AttentionStruct),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("activation", c_int32),
        ("attention_norm", NormStruct),
        ("attention_post_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("mlp_post_norm", NormStruct),
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
        ("logit_softcap", c_float),
    )


class CacheLayerStruct(Structure):
    """ap_cache_layer."""

    _fields_ = (
        ("offset", c_int64),
        ("open_offset", c_int64),
        ("head_scales", c_void_p),
        ("key_mean", c_void_p),
        ("format", c_int32),
        ("reserved", c_int32),
    )


class CacheStruct(Structure):
    """ap_cache."""

    _fields_ = (
        ("base", c_void_p),
        ("block_bytes", c_int64),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("layers", POINTER(CacheLayerStruct)),
        ("open_base", c_void_p),
        ("open_bytes", c_int64),
        ("num_open", c_int32),
        ("reserved", c_int32),
    )


class BatchStruct(Structure):
    """ap_batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("table_width", c_int32),
        ("num_rows", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("rows", c_void_p),
        ("open_pages", c_void_p),
    )


class SamplingStruct(Structure):
    """ap_sampling."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ap_linear": LinearStruct,
    "ap_norm": NormStruct,
    "ap_rope": RopeStruct,
    "ap_attention": AttentionStruct,
    "ap_layer": LayerStruct,
    "ap_model": ModelStruct,
    "ap_cache_layer": CacheLayerStruct,
    "ap_cache": CacheStruct,
    "ap_batch": BatchStruct,
    "ap_sampling": SamplingStruct,
}
