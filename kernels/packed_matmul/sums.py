"""Sums activations over the groups of a weight that has offsets.

An offset adds offset * (sum of x over the group) to a product. Summed once for all programs, that
takes none of their tensor core instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher
from appliance.kernels.gpu.target import early_options, starts_early
from appliance.kernels.packed_matmul.kernel import group_sums_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.packed_matmul.tiled import TiledWeight

SUMS_BLOCK_M = 16
SUMS_BLOCK_K = 128
_launch_sums = Launcher(group_sums_kernel)


def group_sums(weight: TiledWeight, x: Tensor, least_rows: int) -> Tensor:
    """Sum x over each group of a weight.

    Args:
        weight: laid out for the kernels.
        x: (num_tokens, in_features), each row contiguous.
        least_rows: columns of the result that are read, at least num_tokens.

    Returns:
        (groups, columns) float32, zero behind num_tokens; columns is a multiple of 16.
    """
    early = starts_early(x.device)
    columns = -(-least_rows // SUMS_BLOCK_M) * SUMS_BLOCK_M
    width = weight.codes.shape[1] * weight.order.tile_k
    sums = torch.empty(width // weight.group_size, columns, dtype=torch.float32, device=x.device)
    grid = columns // SUMS_BLOCK_M, -(-width // SUMS_BLOCK_K)
    arguments = sums, x, x.shape[0], weight.in_features, x.stride(0), columns, sums.shape[0]
    options = {
        "GROUP": weight.group_size,
        "BLOCK_M": SUMS_BLOCK_M,
        "BLOCK_K": SUMS_BLOCK_K,
        "EARLY": early,
        "num_warps": 4,
        **early_options(early=early),
    }
    _launch_sums(grid, arguments, options)
    return sums
