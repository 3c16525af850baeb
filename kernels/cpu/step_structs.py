"""The structs of a step's inputs besides the model, as in src/appliance_cpu.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from enum import IntEnum

from appliance.kernels.cpu.structs import MODEL_STRUCTS, LinearStruct


class AdapterPlace(IntEnum):
    """ap_place."""

    INTO_MIXER = 0
    OUT_OF_MIXER = 1
    INTO_MLP = 2
    OUT_OF_MLP = 3


class ExpansionStruct(Structure):
    """ap_expansion."""

    _fields_ = (("linear", LinearStruct), ("first_output", c_int32), ("first_rank", c_int32))


class LowRankStruct(Structure):
    """ap_low_rank."""

    _fields_ = (
        ("shrink", LinearStruct),
        ("scales", c_void_p),
        ("expansions", c_void_p),
        ("num_expansions", c_int32),
    )


class AdapterStruct(Structure):
    """ap_adapter."""

    _fields_ = (("places", c_void_p), ("most_ranks", c_int32))


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
        ("num_states", c_int32),
        ("states", c_void_p),
        ("state_bytes", c_int64),
        ("state_format", c_int32),
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
        ("open_blocks", c_void_p),
        ("state_slots", c_void_p),
        ("adapter_slots", c_void_p),
        ("adapters", c_void_p),
        ("num_adapters", c_int32),
        ("given", c_void_p),
        ("streams", c_void_p),
        ("recorded_layers", c_void_p),
        ("recorded", c_void_p),
        ("num_recorded", c_int32),
        ("num_embeddings", c_int32),
        ("sources", c_void_p),
        ("embeddings", c_void_p),
        ("addends", c_void_p),
        ("num_addends", c_int32),
        ("reserved", c_int32),
        ("axes", c_void_p),
        ("sees", c_void_p),
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


# All structs that Python fills, by their names in C.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    **MODEL_STRUCTS,
    "ap_expansion": ExpansionStruct,
    "ap_low_rank": LowRankStruct,
    "ap_adapter": AdapterStruct,
    "ap_cache_layer": CacheLayerStruct,
    "ap_cache": CacheStruct,
    "ap_batch": BatchStruct,
    "ap_sampling": SamplingStruct,
}
