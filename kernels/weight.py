"""What the weight of a linear may be, whatever checkpoint it came from. Imports nothing of ours."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.packed import PackedWeight

Weight: TypeAlias = Tensor | PackedWeight | Fp8Weight  # (out_features, in_features)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight itself, (out_features, in_features), in `dtype`."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)
