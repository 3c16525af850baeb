"""Scales and zero points of a packed weight, as formats want them that know one group size."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.packed import OffsetKind, PackedWeight


def scales_in_groups(values: Tensor, group_size: int, wanted: int) -> Tensor:
    """Repeat what belongs to groups for each of the smaller groups that they are cut into.

    Args:
        values: (out_features, groups).
        group_size: inputs of a group.
        wanted: of the smaller ones; divides it.
    """
    assert group_size % wanted == 0, (group_size, wanted)
    return values.repeat_interleave(group_size // wanted, dim=1)


def zero_points_of(weight: PackedWeight) -> Tensor | None:
    """Zero points as codes, (out_features, groups) uint8; None if an offset is no multiple."""
    found = weight.offset.float()
    if weight.offset_kind is OffsetKind.ADDITIVE:
        # Of a group of zeros any will do; the middle is what symmetric weights have.
        found = (-found / weight.scale.float()).nan_to_num(1 << (weight.bits - 1)).round()
        if not torch.equal(weight.offset, (-found * weight.scale.float()).to(weight.offset.dtype)):
            return None
    is_code = (found == found.round()) & (found >= 0) & (found < 1 << weight.bits)
    return found.to(torch.uint8) if bool(is_code.all()) else None


def integer_zero_points(weight: PackedWeight) -> Tensor:
    """Zero points of a weight that has them: (out_features, groups) uint8."""
    found = zero_points_of(weight)
    assert found is not None, "no zero points, but offsets"
    return found
