"""Sorts pairs of tokens and experts by expert, in blocks that one program multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.grouped_matmul.kernel import count_kernel, sort_kernel
from appliance.kernels.grouped_matmul.variant import CHUNK, most_blocks, tile_of

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.packed_matmul.tiles import MatmulTile

_launch_count = Launcher(count_kernel)
_launch_sort = Launcher(sort_kernel)
COUNTS = 4096  # read together by a program of the sort


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of tokens and experts in blocks of one expert each.

    Attributes:
        pairs: (blocks * rows of a block,) int32; negative is padding.
        experts: (blocks,) int32, of each block; negative is padding.
        tile: of the kernel that multiplies a block.
        ids: (num_tokens, top_k) int64, the expert of each pair; outside of those that are here,
            the pair is in no block.
    """

    pairs: Tensor
    experts: Tensor
    tile: MatmulTile
    ids: Tensor

    @classmethod
    def empty(cls, ids: Tensor, num_experts: int, timed: TimedChoices | None = None) -> SortedPairs:
        """Take memory for as many blocks as these pairs can fill."""
        tile = tile_of(ids.numel(), num_experts, timed)
        blocks = most_blocks(ids.numel(), num_experts, tile.block_m)
        pairs, experts = (
            torch.empty(count, dtype=torch.int32, device=ids.device)
            for count in (blocks * tile.block_m, blocks)
        )
        return cls(pairs, experts, tile, ids)

    @property
    def num_pairs(self) -> int:
        """Number of pairs without padding."""
        return self.ids.numel()


def sort_pairs(ids: Tensor, num_experts: int, timed: TimedChoices | None = None) -> SortedPairs:
    """Sort a router's choice, (num_tokens, top_k) int64, by expert.

    Args:
        ids: the choice.
        num_experts: that are here.
        timed: of the experts, for the tile of a block.
    """
    rows = SortedPairs.empty(ids.contiguous(), num_experts, timed)
    counts = torch.empty((1, num_experts), dtype=torch.int32, device=ids.device)
    with device_of(ids):
        arguments = (counts, rows.ids, rows.num_pairs)
        _launch_count((num_experts,), arguments, {"CHUNK": CHUNK, "num_warps": 4})
    sort_counted(rows, counts)
    return rows


def sort_counted(rows: SortedPairs, counts: Tensor) -> None:
    """Write pairs and experts.

    Args:
        rows: with the expert of each pair.
        counts: (parts, num_experts) int32, each expert's pairs in each part of all rows.
    """
    parts, num_experts = counts.shape
    padded = max(2, 1 << (num_experts - 1).bit_length())
    arguments = (
        rows.pairs,
        rows.experts,
        counts,
        rows.ids,
        parts,
        rows.num_pairs,
        len(rows.experts),
        num_experts,
    )
    options = {
        "EXPERTS": padded,
        "PARTS": parts_at_once(parts, padded),
        "BLOCK_M": rows.tile.block_m,
        "CHUNK": CHUNK,
        "num_warps": 4,
    }
    with device_of(rows.ids):
        _launch_sort((num_experts,), arguments, options)


def parts_at_once(parts: int, experts: int) -> int:
    """Return the parts whose counts a program of the sort reads together, a power of two."""
    return 1 if parts == 1 else max(1, COUNTS // experts)
