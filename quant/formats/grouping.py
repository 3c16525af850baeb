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


def integer_zero_points(weight: PackedWeight) -> Tensor:
    """Zero points as codes: (out_features, groups) uint8."""
    if weight.offset_kind is OffsetKind.ZERO_POINT:
        return weight.offset.to(torch.uint8)
    middle = 1 << (weight.bits - 1)
    assert torch.equal(weight.offset, -middle * weight.scale), "no zero point, but an offset"
    return torch.full(weight.offset.shape, middle, dtype=torch.uint8)
