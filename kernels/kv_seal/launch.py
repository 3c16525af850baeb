"""Launches sealing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.kv_page.layout import DIM_STEP, page_bytes, stored_dims
from appliance.kernels.kv_seal.kernel import seal_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.sealed_blocks import SealedBlocks

WARP_DIMS = 64  # most of a warp, which holds 32 tokens of each in registers
_launch_seal = Launcher(seal_kernel)


def seal(cache: SealedBlocks, moves: Tensor) -> None:
    """Quantize full open blocks into their blocks, in place; see `reference.seal`.

    Args:
        moves: (num_moves, 2) int64, open block and block; a negative open block is padding.
    """
    if not len(moves):
        return
    with device_of(cache.closed.pages):
        _launch_seal(
            (len(moves), cache.num_kv_heads),
            (
                cache.closed.pages,
                cache.closed.halves,
                cache.open.pages,
                cache.open.halves,
                moves,
                cache.num_kv_heads,
            ),
            {**constexprs(cache.head_dim), "num_warps": num_warps(cache.head_dim)},
        )


def constexprs(head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `seal_kernel`."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(DIM_STEP, 1 << (head_dim - 1).bit_length()),
        "HEAD_DIM_STORED": stored_dims("int4-sealed", head_dim),
        "CLOSED_BYTES": page_bytes("int4-sealed", head_dim),
        "OPEN_BYTES": page_bytes("int8", head_dim),
    }


def num_warps(head_dim: int) -> int:
    """Return the warps of a program, which together hold the keys or values of a page."""
    return max(4, -(-head_dim // WARP_DIMS))
