"""Loads a weight and checks its numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.fp4 import Fp4Weight
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.model.weight_format import DTYPE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource

_DENSE_DTYPES = frozenset({*DTYPE_NAMES, "float64"})


def load_checked(source: ModelSource, name: str, device: torch.device | None) -> Weight:
    """Load a weight onto a torch device; None leaves it where it was read.

    Raises:
        CheckpointError: the weight holds NaN or infinity.
        UnsupportedModelError: its type needs a `quantization_config`, which is missing.
    """
    weight = source.weights.load(name)
    if arrays.is_array(weight) and arrays.dtype_name(weight.dtype) not in _DENSE_DTYPES:
        raise UnsupportedModelError(
            f"{source.path.name}: tensor {name} has type {weight.dtype}, but config.json has no "
            "quantization_config that says what it means; use the settings of the same checkpoint"
        )
    if device is not None:
        weight = weight.to(device)
    check_finite(weight, source.path, name)
    return weight


def check_finite(weight: Weight, path: Path, name: str) -> None:
    """Check a weight's numbers, or the scales of a packed one.

    Raises:
        CheckpointError: the weight holds NaN or infinity.
    """
    if not _is_finite(weight):
        raise CheckpointError(
            f"{path.name}: tensor {name} holds NaN or infinity; fetch or quantize the model again"
        )


def _is_finite(weight: Weight) -> bool:
    if isinstance(weight, PackedWeight):
        return _all_finite(weight.scale) and _all_finite(weight.offset)
    if isinstance(weight, Fp8Weight | Fp4Weight | GgmlWeight):
        return weight.is_finite()
    return _all_finite(weight)


def _all_finite(tensor: Tensor) -> bool:
    """Check the sum first, which decides nearly all cases and is many times faster."""
    if math.isfinite(arrays.total(tensor)):
        return True
    return arrays.is_finite(tensor)
