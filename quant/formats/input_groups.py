"""Sorts inputs by the groups that a checkpoint's `g_idx` lists (GPTQ's act-order)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.quant.formats.pack import pack_codes, unpack_codes
from appliance.quant.formats.scheme import GROUP_SIZES

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.weights.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class InputGroups:
    """Inputs sorted so that a group's inputs are adjacent.

    Attributes:
        order: (in_features,) int32, the input at each place; None if already sorted.
        source: (in_features / size,) int64, the stored group whose scale each group takes.
    """

    order: NDArray[np.int32] | None
    size: int
    source: NDArray[np.int64]


def even_groups(in_features: int, group_size: int) -> InputGroups:
    """Group adjacent inputs; a smaller last group makes all groups smaller."""
    return _grouped("", np.arange(in_features) // group_size, group_size, None)


def listed_groups(name: str, g_idx: Tensor, group_size: int, num_groups: int) -> InputGroups:
    """Build groups from an act-order list.

    Args:
        g_idx: (in_features,) integers, the group of each input.
        group_size: inputs per stored group.
        num_groups: number of stored groups.

    Raises:
        CheckpointError: a listed group has no scale.
        UnsupportedModelError: no supported group size divides the groups.
    """
    groups = g_idx.numpy().astype(np.int64)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise CheckpointError(
            f"{name} names group {int(groups.max())} of {num_groups}; download the model again"
        )
    if bool((np.diff(groups) >= 0).all()):
        return _grouped(name, groups, group_size, None)
    order = np.argsort(groups, stable=True)
    return _grouped(name, groups[order], group_size, order.astype(np.int32))


def regrouped(name: str, weight: PackedWeight, g_idx: Tensor) -> PackedWeight:
    """Apply an act-order list to a weight decoded with adjacent groups.

    Args:
        weight: codes in the order of the inputs, scales in the order of the groups.
        g_idx: (in_features,) integers, the group of each input; a -1 anywhere disables the list.

    Raises:
        CheckpointError: a listed group has no scale.
        UnsupportedModelError: no supported group size divides the groups.
    """
    if bool((g_idx == -1).any()):
        return weight
    groups = listed_groups(name, g_idx, weight.group_size, weight.scale.shape[1])
    codes = weight.codes
    if groups.order is not None:
        codes = pack_codes(unpack_codes(codes, weight.bits)[:, groups.order], weight.bits)
    return replace(
        weight,
        codes=codes,
        scale=weight.scale[:, groups.source].contiguous(),
        offset=weight.offset[:, groups.source].contiguous(),
        group_size=groups.size,
        input_order=None if groups.order is None else arrays.like(codes, groups.order),
    )


def _grouped(
    name: str, groups: NDArray[np.int64], group_size: int, order: NDArray[np.int32] | None
) -> InputGroups:
    """Split runs of one group into pieces of equal size."""
    ends = np.flatnonzero(np.diff(groups, append=-1))
    counts = np.diff(ends, prepend=-1)
    for size in (group_size, *GROUP_SIZES):
        if size <= group_size and not bool((counts % size).any()):
            return InputGroups(order, size, groups[::size])
    raise UnsupportedModelError(
        f"{name or 'a weight'} has groups of {sorted(set(counts.tolist()))} inputs; "
        f"supported are multiples of {GROUP_SIZES[-1]}"
    )
