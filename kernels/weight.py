"""The kinds of weight of a linear, whatever its checkpoint. Imports nothing of ours."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from appliance.kernels.fp4 import Fp4Weight
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight

# (out_features, in_features)
Weight: TypeAlias = Tensor | PackedWeight | Fp8Weight | Fp4Weight | GgmlWeight


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight itself, (out_features, in_features), in `dtype`."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def some_rows(weight: Weight, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Select outputs by a range or by indices (num_rows,), in `dtype`, without unpacking others."""
    if isinstance(weight, PackedWeight | Fp4Weight | GgmlWeight):
        return weight.rows(rows).dequantize(dtype)
    if isinstance(weight, Fp8Weight):
        assert isinstance(rows, slice), "no embedding is FP8"
        return weight.dequantize(dtype, rows)
    return weight[rows].to(dtype)


def column_unit(weight: Weight) -> int | None:
    """Inputs between two places where a weight can be cut without loss; None: nowhere."""
    return 1 if isinstance(weight, Tensor) else weight.column_unit


def some_columns(weight: Weight, first: int, last: int) -> Weight:
    """Select inputs [first, last) of a weight; both are multiples of its `column_unit`."""
    if isinstance(weight, Tensor):
        return weight[:, first:last].contiguous()
    return weight.columns(first, last)
