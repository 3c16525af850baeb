"""The compile-time choices of a packed matmul. Imports no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from appliance.kernels.activation import GateConstexprs, gate_constexprs
from appliance.kernels.packed_matmul.tiled import Codes, Params, record_words
from appliance.kernels.packed_matmul.tiles import WHOLE
from appliance.kernels.weight_codes.order import TileOrder

if TYPE_CHECKING:
    from appliance.kernels.activation import Gating
    from appliance.kernels.packed_matmul.tiled import TiledWeight
    from appliance.kernels.packed_matmul.tiles import MatmulTile

# Rows of a program that looks some up, and of one that makes a slice dense.
LOOKUP_BLOCK_M = 1
DENSE_BLOCK_M = 16
ROWS_WARPS = 4
RECORD_OFFSETS = (Params.Q2_K, Params.Q4_K, Params.Q5_1)
OFFSETS = (Params.FP16_OFFSET, Params.FP32_OFFSET, *RECORD_OFFSETS)
MIDDLE_ROWS = 17  # rows from which weights with records take sums of x, too


class MatmulConstexprs(GateConstexprs):
    """The compile-time arguments of `packed_matmul_kernel`."""

    CODES: str
    AXES: tuple[int, ...]
    TRELLIS: int
    WORDS: int
    TILE_K: int
    PARAMS: str
    OFFSETS: bool
    RECORD: int
    GROUP: int
    SCALES: int
    FOLDED: int
    EVEN_K: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILEWISE: bool
    STAGES: int
    EARLY: bool
    ASM: bool


def matmul_constexprs(
    weight: TiledWeight, tile: MatmulTile, *, activation: Gating | None, early: bool, asm: bool
) -> MatmulConstexprs:
    """Return the compile-time arguments of `packed_matmul_kernel`."""
    return constexprs_of(
        weight.kind,
        weight.params_kind,
        weight.group_size,
        weight.block_k,
        tile,
        activation=activation,
        even_k=weight.in_features % weight.block_k == 0,
        early=early,
        asm=asm,
    )


def constexprs_of(
    kind: Codes,
    params_kind: Params,
    group_size: int,
    block_k: int,
    tile: MatmulTile,
    *,
    activation: Gating | None = None,
    even_k: bool = True,
    early: bool = False,
    asm: bool = True,
) -> MatmulConstexprs:
    """Return `matmul_constexprs` of a weight that need not exist."""
    order = TileOrder(kind.bits)
    folded = group_size if tile.folds and kind is not Codes.FP4 else 0
    group = 0 if folded else product_group(kind, group_size)
    is_record = params_kind in RECORD_OFFSETS
    short = group_size if folded else group
    assert not is_record or short < order.tile_k, "only short groups take products with ones"
    return {
        "CODES": kind.value,
        "AXES": order.kernel_axes(groups=max(1, order.tile_k // group) if group else 1),
        "TRELLIS": kind.bits if kind.is_trellis else 0,
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        "OFFSETS": params_kind in OFFSETS,
        "RECORD": record_words(params_kind, block_k),
        **_scaling(kind, 0 if folded else group_size),
        "FOLDED": folded,
        **gate_constexprs(activation),
        "EVEN_K": even_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "TILEWISE": tile.tilewise,
        "STAGES": tile.num_stages,
        "EARLY": early,
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


def tiling_group(kind: Codes, group_size: int) -> int:
    """Return the inputs of one scaled product by which tiles are chosen; 0 means all.

    To look symbols up takes the registers that one sum leaves to a taller tile.
    """
    return WHOLE if kind.is_trellis else product_group(kind, group_size)


def may_fold(kind: Codes, group_size: int) -> bool:
    """Return True if weights of long groups can take scale and offset in registers.

    They are rounded to the dtype of activations then, as dense weights are.
    """
    return kind is Codes.INT4 and group_size >= TileOrder(kind.bits).tile_k


def takes_sums(params_kind: Params, max_rows: int) -> bool:
    """Return True if a kernel before the product sums x over its groups.

    Other weights with offsets take a product with ones beside each product. With records and few
    rows that is fewer instructions: loads of sums come on top of unpacking scales.
    """
    is_packed = params_kind not in RECORD_OFFSETS
    return params_kind in OFFSETS and (is_packed or max_rows >= MIDDLE_ROWS)


def dequantize_constexprs(
    kind: Codes, params_kind: Params, group_size: int, block_k: int, *, asm: bool = True
) -> dict[str, object]:
    """Return the compile-time arguments of `dequantize_kernel`."""
    order = TileOrder(kind.bits)
    return {
        "CODES": kind.value,
        "AXES": order.kernel_axes(),
        "TRELLIS": kind.bits if kind.is_trellis else 0,
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        **_scaling(kind, group_size),
        "BLOCK_K": block_k,
        "ASM": asm,
    }


def rows_constexprs(
    kind: Codes, params_kind: Params, group_size: int, block_k: int, block_m: int
) -> dict[str, object]:
    """Return the compile-time arguments of `rows_kernel`."""
    order = TileOrder(kind.bits)
    middle = 0 if params_kind in OFFSETS else 1 << (kind.bits - 1)
    return {
        "BITS": kind.bits,
        "MIDDLE": None if kind.names_values else middle,
        "CODES": kind.value if kind.names_values else None,
        "WORDS": order.words,
        "TILE_K": order.tile_k,
        "PARAMS": params_kind.value,
        "RECORD": record_words(params_kind, block_k),
        "GROUP": group_size,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }
