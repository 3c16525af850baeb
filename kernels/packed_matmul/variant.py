"""What is fixed when a packed matmul is compiled. Imports no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.weight_codes.order import TileOrder

if TYPE_CHECKING:
    from appliance.kernels.packed_matmul.tiled import TiledWeight
    from appliance.kernels.packed_matmul.tiles import MatmulTile

MIDDLE_ROWS = 17  # from here on, the sums of x over its groups are made by a kernel of their own
SUMS_BLOCK_M = 16
SUMS_BLOCK_K = 128
DEQUANTIZED_AT_ONCE = 32 << 20  # elements of a dense weight, 64 MiB
OFFSETS = (Params.FP16_OFFSET, Params.FP32_OFFSET)


class MatmulConstexprs(TypedDict):
    """The compile-time arguments of `packed_matmul_kernel`."""

    CODES: str
    AXES: tuple[int, ...]
    WORDS: int
    TILE_K: int
    PARAMS: str
    GROUP: int
    SUMS: bool
    GATED: bool
    SPLITS: int
    EVEN_K: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILEWISE: bool
    STAGES: int
    ASM: bool


def matmul_constexprs(
    weight: TiledWeight, tile: MatmulTile, splits: int, *, gated: bool, asm: bool
) -> MatmulConstexprs:
    """What `packed_matmul_kernel` is specialized for."""
    return constexprs_of(
        weight.kind,
        weight.params_kind,
        weight.group_size,
        weight.block_k,
        tile,
        splits,
        gated=gated,
        even_k=weight.in_features % weight.block_k == 0,
        asm=asm,
    )


def constexprs_of(
    kind: Codes,
    params_kind: Params,
    group_size: int,
    block_k: int,
    tile: MatmulTile,
    splits: int,
    *,
    gated: bool = False,
    even_k: bool = True,
    asm: bool = True,
) -> MatmulConstexprs:
    """As `matmul_constexprs`, for a weight that need not exist."""
    order = TileOrder(kind.bits)
    return {
        "CODES": kind.value,
        "AXES": order.kernel_axes(first_group=0 < group_size < order.tile_k),
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        "GROUP": group_size,
        "SUMS": params_kind in OFFSETS and tile.max_rows >= MIDDLE_ROWS,
        "GATED": gated,
        "SPLITS": splits,
        "EVEN_K": even_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "TILEWISE": tile.tilewise,
        "STAGES": tile.num_stages,
        "ASM": asm,
    }


def dequantize_constexprs(weight: TiledWeight, *, asm: bool) -> dict[str, object]:
    """What `dequantize_kernel` is specialized for."""
    return {
        "CODES": weight.kind.value,
        "AXES": weight.order.kernel_axes(),
        "WORDS": weight.order.words,
        "TILE_K": weight.order.tile_k,
        "PARAMS": weight.params_kind.value,
        "GROUP": weight.group_size,
        "BLOCK_K": weight.block_k,
        "ASM": asm,
    }
