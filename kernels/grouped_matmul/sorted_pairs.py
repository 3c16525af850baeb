"""Sorts pairs of tokens and experts by expert, in blocks that one program multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels.grouped_matmul.kernel import count_kernel, sort_kernel
from appliance.kernels.grouped_matmul.variant import CHUNK, choose_tile, most_blocks

if TYPE_CHECKING:
    from appliance.kernels.packed_matmul.tiles import MatmulTile


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of tokens and experts in blocks of one expert each.

    Attributes:
        pairs: (blocks * rows of a block,) int32; negative is padding.
        experts: (blocks,) int32, of each block; negative is padding.
        tile: of the kernel that multiplies a block.
        ids: (num_tokens, top_k) int64, the expert of each pair.
    """

    pairs: Tensor
    experts: Tensor
    tile: MatmulTile
    ids: Tensor

    @property
    def num_pairs(self) -> int:
        """Number of pairs without padding."""
        return self.ids.numel()


def sort_pairs(ids: Tensor, num_experts: int) -> SortedPairs:
    """Sort a router's choice, (num_tokens, top_k) int64, by expert."""
    num_pairs = ids.numel()
    tile = choose_tile(num_pairs, num_experts)
    blocks = most_blocks(num_pairs, num_experts, tile.block_m)

    def empty(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=ids.device)

    counts, pairs, experts = empty(num_experts), empty(blocks * tile.block_m), empty(blocks)
    ids = ids.contiguous()
    with torch.cuda.device(ids.get_device()):
        count_kernel[(num_experts,)](counts, ids, num_pairs, CHUNK=CHUNK, num_warps=4)
        sort_kernel[(num_experts,)](
            pairs,
            experts,
            counts,
            ids,
            num_pairs,
            blocks,
            num_experts,
            EXPERTS=max(2, 1 << (num_experts - 1).bit_length()),
            BLOCK_M=tile.block_m,
            CHUNK=CHUNK,
            num_warps=4,
        )
    return SortedPairs(pairs, experts, tile, ids)
