"""Loads a weight and checks that its numbers mean something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.fp4 import Fp4Weight
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.model.weight_format import DTYPE_NAMES

if TYPE_CHECKING:
    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource

_DENSE_DTYPES = frozenset({*DTYPE_NAMES, torch.float64})


def load_checked(source: ModelSource, name: str, device: torch.device) -> Weight:
    """Load a weight onto a device.

    Raises:
        CheckpointError: it holds NaN or infinity.
        UnsupportedModelError: its type has no meaning without a `quantization_config`.
    """
    weight = source.weights.load(name)
    if isinstance(weight, Tensor) and weight.dtype not in _DENSE_DTYPES:
        raise UnsupportedModelError(
            f"{source.path.name}: tensor {name} has type {weight.dtype}, but config.json has no "
            "quantization_config that says what it means"
        )
    weight = weight.to(device)
    if not _is_finite(weight):
        raise CheckpointError(
            f"{source.path.name}: tensor {name} holds NaN or infinity; "
            "fetch or quantize the model again"
        )
    return weight


def _is_finite(weight: Weight) -> bool:
    if isinstance(weight, PackedWeight):
        return _all_finite(weight.scale) and _all_finite(weight.offset)
    if isinstance(weight, Fp8Weight | Fp4Weight | GgmlWeight):
        return weight.is_finite()
    return _all_finite(weight)


def _all_finite(tensor: Tensor) -> bool:
    """Look at the sum, which decides nearly all cases, many times faster than at each element."""
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
