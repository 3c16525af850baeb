"""Estimates the bytes of a model's weights as laid out, before loading any."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.weights.trellis import BLOCK
from appliance.model.gguf_weights import GGUFReader
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

# Stored by packed kernels besides codes: bytes of scale and offset per group. Groups have one of
# these sizes: a longer one becomes several, and one whose size is unknown may be the smallest.
_PARAMS_BYTES = 4
_GROUPS = 128, 64, 32

# A GPU kernel's FP8 weight has a float32 scale per output and 128 inputs, FP4 a byte per 16.
_FLOAT_SCALE_BYTES_PER_WEIGHT = {8: 4 / 128, 4: 1 / 16}

_GPU_ROWS = 128  # of a GPU kernel's tallest block

# Stored by the CPU library besides codes, at most: two 32-bit numbers per group, or one per group
# of 16 with 4-bit floats.
_GROUP_BYTES = 8
_FLOAT_GROUP_BYTES_PER_WEIGHT = 4 / 16

_ALIGNMENT = 64  # of the library's tensors


def estimate_weight_bytes(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    copies: Callable[[TensorSlot], float] = lambda slot: 1,
) -> int:
    """Estimate the bytes of all weights; an upper bound if the backend chooses the layout.

    `copies` returns how often a tensor is stored.
    """
    each = (copies(slot) * slot_bytes(source, slot, device, dtype) for slot in source.slots())
    return math.ceil(sum(each))


def slot_bytes(
    source: ModelSource, slot: TensorSlot, device: torch.device, dtype: torch.dtype
) -> float:
    """Estimate the bytes of one tensor.

    On a GPU, packed and FP8 weights keep their form unless activations are float32; other matrices
    have the activations' type. A packed embedding stays packed, beside the form that products read
    if the head is tied to it. Blocks of GGUF files take what they take there, and a tied head
    shares them.
    """
    stay_packed = (
        {4, 8} if device.type != "cpu" and arrays.dtype_name(dtype) != "float32" else set[int]()
    )
    count = math.prod(slot.shape)
    weights = source.weights
    if isinstance(weights, GGUFReader) and weights.is_held(slot.name) and device.type != "cpu":
        if not stay_packed:
            return count * dtype.itemsize
        rows = math.ceil(slot.shape[0] / _GPU_ROWS) * _GPU_ROWS
        return rows * slot.shape[1] * weights.held_bytes(slot.name)
    bits = source.weights.packed_bits(slot.name)
    if bits in (2, 3) and not (source.is_trellis or isinstance(weights, GGUFReader)):
        bits = 4  # as a `PackedWeight`
    float_bits = source.weights.float_bits(slot.name)
    if len(slot.shape) != 2:  # norms, biases and filters
        return 4.0 * count
    if float_bits in stay_packed:
        held = count * (float_bits / 8 + _FLOAT_SCALE_BYTES_PER_WEIGHT[float_bits])
        if slot.role is not Role.EMBEDDING:
            return held
        # Lookups read it in the activations' type.
        return count * dtype.itemsize + (held if source.spec.tied_head else 0)
    if source.is_trellis and bits is not None:
        rows = math.ceil(slot.shape[0] / _GPU_ROWS) * _GPU_ROWS
        dense = float(count * dtype.itemsize)
        held = rows * (slot.shape[1] * bits / 8 + _PARAMS_BYTES) if stay_packed else dense
        if slot.role is Role.EMBEDDING:  # looked up dense
            return dense + (held if source.spec.tied_head else 0)
        return held
    group = weights.group_size(slot.name) or _GROUPS[-1]
    table = 0.0
    if bits is not None and slot.role is Role.EMBEDDING:
        table = count * (bits / 8 + _PARAMS_BYTES / group)
        if not source.spec.tied_head:
            return table
    if bits in stay_packed:
        kernels = next((size for size in _GROUPS if group % size == 0), _GROUPS[-1])
        return table + count * (bits / 8 + _PARAMS_BYTES / kernels)
    return table + count * dtype.itemsize


def estimate_native_bytes(
    source: ModelSource, dtype: Any, copies: Callable[[TensorSlot], float] = lambda slot: 1
) -> int:
    """Estimate the most bytes of all weights in the CPU library; a tied matrix counts once.

    `copies` returns how often a tensor is stored.
    """
    slots = source.slots()
    return math.ceil(sum(native_slot_bytes(source, slot, dtype, copies(slot)) for slot in slots))


def native_slot_bytes(
    source: ModelSource, slot: TensorSlot, dtype: Any, copies: float = 1
) -> float:
    """Estimate the bytes of one tensor in the CPU library.

    FP8 weights count as `dtype`, the most they take.
    """
    count = math.prod(slot.shape) * copies
    weights = source.weights
    bits, float_bits = weights.packed_bits(slot.name), weights.float_bits(slot.name)
    if len(slot.shape) != 2:  # norms, biases and filters
        total = 4.0 * count
    elif isinstance(weights, GGUFReader) and (bits or float_bits):
        total = count * weights.held_bytes(slot.name)
    elif float_bits == 4:
        total = count * (float_bits / 8 + _FLOAT_GROUP_BYTES_PER_WEIGHT)
    elif source.is_trellis and bits is not None:
        rows = math.ceil(slot.shape[0] / BLOCK) * BLOCK * copies
        total = rows * (slot.shape[1] * bits / 8 + _PARAMS_BYTES)
    elif bits is not None and float_bits is None:
        group = weights.group_size(slot.name) or _GROUPS[-1]
        held = next((size for size in _GROUPS if group % size == 0), _GROUPS[-1])
        total = count * (bits / 8 + _GROUP_BYTES / held)
    else:
        total = count * dtype.itemsize
    return total + _ALIGNMENT
