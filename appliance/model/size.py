"""Estimates the bytes of a model's weights as laid out, before loading any."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.model.gguf_weights import GGUFReader
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

# Stored by packed kernels per weight besides its code: four bytes of scale and offset per group;
# the smallest groups have 32.
_PARAMS_BYTES_PER_WEIGHT = 4 / 32

# A GPU kernel's FP8 weight has a float32 scale per output and 128 inputs, FP4 a byte per 16.
_FLOAT_SCALE_BYTES_PER_WEIGHT = {8: 4 / 128, 4: 1 / 16}

_GPU_ROWS = 128  # of a GPU kernel's tallest block

# Stored by the CPU library per weight besides its code, at most: two 32-bit numbers per group of
# 32, or one per group of 16 with 4-bit floats.
_SCALE_BYTES_PER_WEIGHT = 8 / 32

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
    have the activations' type, and a packed embedding stays packed. Blocks of GGUF files take what
    they take there, and a tied head shares them.
    """
    stay_packed = (
        {4, 8} if device.type != "cpu" and arrays.dtype_name(dtype) != "float32" else set[int]()
    )
    count = math.prod(slot.shape)
    weights = source.weights
    if stay_packed and isinstance(weights, GGUFReader) and weights.is_held(slot.name):
        rows = math.ceil(slot.shape[0] / _GPU_ROWS) * _GPU_ROWS
        return rows * slot.shape[1] * weights.held_bytes(slot.name)
    bits = source.weights.packed_bits(slot.name)
    float_bits = source.weights.float_bits(slot.name)
    if len(slot.shape) != 2:  # norms, biases and filters
        total = 4.0 * count
    elif float_bits in stay_packed:
        total = count * (float_bits / 8 + _FLOAT_SCALE_BYTES_PER_WEIGHT[float_bits])
    elif bits in stay_packed:
        total = count * (bits / 8 + _PARAMS_BYTES_PER_WEIGHT)
    else:
        total = count * dtype.itemsize
    if slot.role is Role.EMBEDDING and bits is not None:
        total += count * bits / 8 * 1.25
    return total


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
        total = count * (float_bits / 8 + _SCALE_BYTES_PER_WEIGHT)
    elif bits is not None and float_bits is None:
        total = count * (bits / 8 + _SCALE_BYTES_PER_WEIGHT)
    else:
        total = count * dtype.itemsize
    return total + _ALIGNMENT
