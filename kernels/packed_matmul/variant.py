"""The compile-time choices of a packed matmul. Imports no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.weight_codes.order import TileOrder

if TYPE_CHECKING:
    from appliance.kernels.packed_matmul.tiled import TiledWeight
    from appliance.kernels.packed_matmul.tiles import MatmulTile

MIDDLE_ROWS = 17  # rows from which a separate kernel sums x over its groups
SUMS_BLOCK_M = 16
SUMS_BLOCK_K = 128
# Elements of a dense slice, 16 MiB: with its part of the result it fits the L2 of most cards, so
# the product does not read it back from memory.
DEQUANTIZED_AT_ONCE = 8 << 20
OFFSETS = (Params.FP16_OFFSET, Params.FP32_OFFSET)


class MatmulConstexprs(TypedDict):
    """The compile-time arguments of `packed_matmul_kernel`."""

    CODES: str
    AXES: tuple[int, ...]
    WORDS: int
    TILE_K: int
    PARAMS: str
    GROUP: int
    SCALES: int
    SUMS: bool
    GATED: bool
    EVEN_K: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILEWISE: bool
    STAGES: int
    ASM: bool


def matmul_constexprs(
    weight: TiledWeight, tile: MatmulTile, *, gated: bool, asm: bool
) -> MatmulConstexprs:
    """Return the compile-time arguments of `packed_matmul_kernel`."""
    return constexprs_of(
        weight.kind,
        weight.params_kind,
        weight.group_size,
        weight.block_k,
        tile,
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
    *,
    gated: bool = False,
    even_k: bool = True,
    asm: bool = True,
) -> MatmulConstexprs:
    """Return `matmul_constexprs` of a weight that need not exist."""
    order = TileOrder(kind.bits)
    return {
        "CODES": kind.value,
        "AXES": order.kernel_axes(
            first_group=_scaling(kind, group_size)["GROUP"] == order.tile_k // 2
        ),
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        **_scaling(kind, group_size),
        "SUMS": params_kind in OFFSETS and tile.max_rows >= MIDDLE_ROWS,
        "GATED": gated,
        "EVEN_K": even_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "TILEWISE": tile.tilewise,
        "STAGES": tile.num_stages,
        "ASM": asm,
    }


class _Scaling(TypedDict):
    GROUP: int
    SCALES: int


def _scaling(kind: Codes, group_size: int) -> _Scaling:
    """Return GROUP and SCALES; 4-bit floats are scaled in registers and have one product."""
    if kind is Codes.FP4:
        return {"GROUP": 0, "SCALES": TileOrder(4).tile_k // group_size}
    return {"GROUP": group_size, "SCALES": 0}


def product_group(kind: Codes, group_size: int) -> int:
    """Return the inputs of one scaled product; 0 means all, scaled once at the end."""
    return _scaling(kind, group_size)["GROUP"]


def dequantize_constexprs(
    kind: Codes, params_kind: Params, group_size: int, block_k: int, *, asm: bool = True
) -> dict[str, object]:
    """Return the compile-time arguments of `dequantize_kernel`."""
    order = TileOrder(kind.bits)
    return {
        "CODES": kind.value,
        "AXES": order.kernel_axes(),
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        **_scaling(kind, group_size),
        "BLOCK_K": block_k,
        "ASM": asm,
    }
