"""Launches the adapters' kernels: sorts a step's rows once, and bounds the grids of each place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from appliance.kernels.adapters.factors import MOST_RANK
from appliance.kernels.adapters.kernel import expand_kernel, shrink_kernel
from appliance.kernels.adapters.variant import (
    NUM_WARPS,
    expand_constexprs,
    shrink_constexprs,
    span_of,
    splits_of,
)
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.grouped_matmul.sorted_pairs import SortedPairs, sort_pairs
from appliance.kernels.grouped_matmul.variant import TILES

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from appliance.kernels.adapters.factors import StackedFactors

AdapterWork: TypeAlias = SortedPairs | None  # None: no rows
_launch_shrink = Launcher(shrink_kernel)
_launch_expand = Launcher(expand_kernel)


def plan_adapters(row_slots: Tensor, num_slots: int) -> AdapterWork:
    """Sort the rows of a step by slot; see `reference.plan_adapters`. No host waits for it."""
    if not len(row_slots):
        return None
    return sort_pairs(row_slots.to(torch.int64).unsqueeze(1), num_slots)


def run_every_kernel(places: Collection[StackedFactors], num_slots: int) -> None:
    """Launch, for rows without an adapter, each kernel that steps of any size need."""
    device = next(iter(places)).shrink.device
    for tile in TILES:
        none = torch.full((num_slots * tile.max_rows,), -1, device=device)
        work = plan_adapters(none, num_slots)
        for factors in places:
            last = max(piece.first_output + piece.num_rows for piece in factors.pieces)
            x, out = (factors.shrink.new_zeros(1, n) for n in (factors.shrink.shape[3], last))
            add_adapters(out, x, factors, work)


def add_adapters(out: Tensor, x: Tensor, factors: StackedFactors, work: AdapterWork) -> None:
    """See `reference.add_adapters`; a graph can hold it. Shrunk rows are rounded to x's dtype."""
    if work is None:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    assert out.stride(1) == 1, out.stride()
    _, num_parts, rank, in_features = factors.shrink.shape
    num_tokens, num_blocks = len(x), len(work.experts)
    splits = splits_of(in_features)
    shrunk = torch.empty(
        (splits, num_tokens, num_parts * rank), dtype=torch.float32, device=x.device
    )
    block_m = work.tile.block_m

    blocks_r = rank // min(rank, MOST_RANK)
    with device_of(x):
        _launch_shrink(
            (num_blocks, num_parts * blocks_r, splits),
            (
                shrunk,
                x,
                factors.shrink,
                factors.ranks,
                work.pairs,
                work.experts,
                num_tokens,
                in_features,
                x.stride(0),
                factors.shrink.stride(0),
                factors.ranks.stride(0),
                num_parts,
                span_of(in_features),
            ),
            {**shrink_constexprs(rank, block_m, in_features), "num_warps": NUM_WARPS},
        )
        _launch_expand(
            (num_blocks, len(factors.blocks)),
            (
                out,
                shrunk,
                factors.expand,
                factors.scales,
                factors.ranks,
                factors.blocks,
                work.pairs,
                work.experts,
                num_tokens,
                out.stride(0),
                factors.expand.stride(0),
                factors.ranks.stride(0),
                num_parts,
            ),
            {**expand_constexprs(rank, block_m, in_features), "num_warps": NUM_WARPS},
        )
