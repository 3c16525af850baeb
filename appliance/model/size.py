"""How many bytes a model's weights will take once they are laid out, before any is loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.model.source import ModelSource

# What packed kernels hold beside a code: four bytes of scale and offset for each group; groups of
# 32 are the smallest there are.
_PARAMS_BYTES_PER_WEIGHT = 4 / 32

# An output feature of a GPU kernel's FP8 weight has a float32 scale for each 128 inputs.
_FP8_SCALE_BYTES_PER_WEIGHT = 4 / 128

# The most that the CPU library holds beside a code: two 32-bit numbers for each group of 32.
_SCALE_BYTES_PER_WEIGHT = 8 / 32


def estimate_weight_bytes(source: ModelSource, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of all weights, rounded up where the layout is the backend's choice.

    On a GPU packed and FP8 weights stay so, unless activations are float32; all other matrices are
    held in the activations' type, and a packed embedding in its codes too.
    """
    stay_packed = {4, 8} if device.type != "cpu" and dtype != torch.float32 else set[int]()
    total = 0.0
    for slot in source.slots():
        count = math.prod(slot.shape)
        bits = source.weights.packed_bits(slot.name)
        if slot.role is Role.NORM:
            total += 4 * count
        elif source.weights.is_fp8(slot.name) and 8 in stay_packed:
            total += count * (1 + _FP8_SCALE_BYTES_PER_WEIGHT)
        elif bits in stay_packed:
            total += count * (bits / 8 + _PARAMS_BYTES_PER_WEIGHT)
        else:
            total += count * dtype.itemsize
        if slot.role is Role.EMBEDDING and bits is not None:
            total += count * bits / 8 * 1.25
    return math.ceil(total)


def estimate_native_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes of all weights in the CPU library, rounded up; a tied matrix is held once.

    FP8 weights are held in `dtype`.
    """
    total = 0.0
    for slot in source.slots():
        count = math.prod(slot.shape)
        bits = source.weights.packed_bits(slot.name)
        if slot.role is Role.NORM:
            total += 4 * count
        elif bits is not None and not source.weights.is_fp8(slot.name):
            total += count * (bits / 8 + _SCALE_BYTES_PER_WEIGHT)
        else:
            total += count * dtype.itemsize
    return math.ceil(total)
