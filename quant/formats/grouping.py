"""Converts a packed weight's scales and zero points to a format's single group size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor


def scales_in_groups(values: Tensor, group_size: int, wanted: int) -> Tensor:
    """Repeat per-group values for smaller groups.

    Args:
        values: (out_features, groups).
        wanted: inputs per smaller group; divides `group_size`.
    """
    assert group_size % wanted == 0, (group_size, wanted)
    return arrays.repeated(values, group_size // wanted, 1)  # type: ignore[no-any-return]


def zero_points_of(weight: PackedWeight) -> Tensor | None:
    """Return zero points as (out_features, groups) uint8; None if an offset is no code."""
    found = weight.offset.float()
    if weight.offset_kind is OffsetKind.ADDITIVE:
        # Any zero point fits a group of zeros; take that of symmetric weights.
        found = (-found / weight.scale.float()).nan_to_num(1 << (weight.bits - 1)).round()
        if not arrays.equal(weight.offset, (-found * weight.scale.float()).to(weight.offset.dtype)):
            return None
    is_code = (found == found.round()) & (found >= 0) & (found < 1 << weight.bits)
    return arrays.cast(found, "uint8") if bool(is_code.all()) else None


def integer_zero_points(weight: PackedWeight) -> Tensor:
    """Return the zero points of a weight that has some, (out_features, groups) uint8."""
    found = zero_points_of(weight)
    assert found is not None, "no zero points, but offsets"
    return found
