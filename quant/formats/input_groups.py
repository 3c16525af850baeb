"""Groups of inputs that a checkpoint lists one by one, as "g_idx", brought side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.formats.pack import pack_codes, unpack_codes
from appliance.quant.formats.scheme import GROUP_SIZES

if TYPE_CHECKING:
    from appliance.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class InputGroups:
    """Which inputs share a scale, such that the members of a group stand side by side.

    Attributes:
        order: (in_features,) int32, the input at each place; None where nothing has to move.
        size: inputs of a group.
        source: (in_features / size,) int64, the stored group whose scale each group has.
    """

    order: Tensor | None
    size: int
    source: Tensor


def even_groups(in_features: int, group_size: int) -> InputGroups:
    """Groups of neighbours; the last stored one may be smaller, and then all are cut."""
    return _grouped("", torch.arange(in_features) // group_size, group_size, None)


def listed_groups(name: str, g_idx: Tensor, group_size: int, num_groups: int) -> InputGroups:
    """Groups as GPTQ's act-order lists them.

    Args:
        name: of the tensor, for errors.
        g_idx: (in_features,) integers, the group of each input.
        group_size: inputs of a stored group.
        num_groups: that have scales.

    Raises:
        CheckpointError: a group that has no scales.
        UnsupportedModelError: groups of sizes that no smaller group of a kernel divides.
    """
    groups = g_idx.long()
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise CheckpointError(
            f"{name} names group {int(groups.max())} of {num_groups}; download the model again"
        )
    if bool((groups.diff() >= 0).all()):
        return _grouped(name, groups, group_size, None)
    order = torch.argsort(groups, stable=True)
    return _grouped(name, groups[order], group_size, order.int())


def regrouped(name: str, weight: PackedWeight, g_idx: Tensor) -> PackedWeight:
    """A weight read as if its groups were of neighbours, with the groups that are listed.

    Args:
        name: of the list, for errors.
        weight: codes in the order of the inputs, scales in the order of the groups.
        g_idx: (in_features,) integers, the group of each input; -1 says that it is of no use.

    Raises:
        CheckpointError: a group that has no scales.
        UnsupportedModelError: groups of sizes that no smaller group of a kernel divides.
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
        input_order=groups.order,
    )


def _grouped(name: str, groups: Tensor, group_size: int, order: Tensor | None) -> InputGroups:
    """Cut runs of one group into equal pieces."""
    _, counts = groups.unique_consecutive(return_counts=True)
    for size in (group_size, *GROUP_SIZES):
        if size <= group_size and not bool((counts % size).any()):
            return InputGroups(order, size, groups[::size])
    raise UnsupportedModelError(
        f"{name or 'a weight'} has groups of {sorted(set(counts.tolist()))} inputs; "
        f"supported are multiples of {GROUP_SIZES[-1]}"
    )
