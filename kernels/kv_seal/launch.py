"""Launches sealing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_seal.kernel import seal_kernel
from appliance.kernels.kv_seal.spec import NUM_WARPS, constexprs

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.sealed_pages import SealedPages


def seal(cache: SealedPages, moves: Tensor) -> None:
    """Quantize full open pages into blocks, in place; see `reference.seal`.

    Args:
        cache: of one layer.
        moves: (num_moves, 2) int64, open page and block; a negative open page only fills up.
    """
    if not len(moves):
        return
    with torch.cuda.device(cache.closed.pages.get_device()):
        seal_kernel[(len(moves), cache.num_kv_heads)](
            cache.closed.pages,
            cache.closed.halves,
            cache.open.pages,
            cache.open.halves,
            moves,
            cache.num_kv_heads,
            **constexprs(cache.head_dim),
            num_warps=NUM_WARPS,
        )
