"""The forms of a linear's weight, whatever its checkpoint. Imports nothing of ours beside."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight

if TYPE_CHECKING:
    from torch import Tensor


# (out_features, in_features)
Packed: TypeAlias = PackedWeight | Fp8Weight | Fp4Weight | GgmlWeight | TrellisWeight
Weight: TypeAlias = "Tensor | Packed"
# what is made of a weight by calibration text, of any layer
CodedWeight: TypeAlias = PackedWeight | Fp4Weight | TrellisWeight


def dense(weight: Weight, dtype: Any) -> Tensor:
    """Return the weight itself, (out_features, in_features), in `dtype`."""
    if isinstance(weight, Packed):
        return weight.dequantize(dtype)
    found: Tensor = arrays.cast(weight, dtype)
    return found


def some_rows(weight: Weight, rows: arrays.Rows, dtype: Any) -> Tensor:
    """Select outputs by a range or by indices (num_rows,), in `dtype`, without unpacking others."""
    if isinstance(weight, PackedWeight | Fp4Weight | GgmlWeight):
        return weight.rows(rows).dequantize(dtype)
    if isinstance(weight, TrellisWeight):
        return weight.dequantize(dtype, rows)
    if isinstance(weight, Fp8Weight):
        assert isinstance(rows, slice), "no embedding is FP8"
        return weight.dequantize(dtype, rows)
    found: Tensor = arrays.cast(weight[rows], dtype)
    return found


def cloned(weight: Weight) -> Weight:
    """Copy a weight, so that it keeps alive nothing that it was taken out of."""
    if not isinstance(weight, Packed):
        return weight.clone()
    own = {field.name: getattr(weight, field.name) for field in fields(weight)}
    copies: dict[str, Any] = {
        name: value.clone() for name, value in own.items() if arrays.is_array(value)
    }
    return replace(weight, **copies)


def column_unit(weight: Weight) -> int | None:
    """Return the inputs between places where a weight can be cut without loss; None if nowhere."""
    return weight.column_unit if isinstance(weight, Packed) else 1


def some_columns(weight: Weight, first: int, last: int) -> Weight:
    """Select inputs [first, last) of a weight; both are multiples of its `column_unit`."""
    if isinstance(weight, Packed):
        return weight.columns(first, last)
    return weight[:, first:last].contiguous()
