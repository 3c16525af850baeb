"""The compile-time choices of an int8 matmul. Imports no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.activation import gate_constexprs
from appliance.kernels.packed_matmul.tiled import Codes, Params, record_words
from appliance.kernels.weight_codes.order import TileOrder

if TYPE_CHECKING:
    from appliance.kernels.activation import Gating
    from appliance.kernels.packed_matmul.slices import LinearForm
    from appliance.kernels.packed_matmul.tiled import TiledWeight
    from appliance.kernels.packed_matmul.tiles import MatmulTile

QUANTIZE_BLOCK_M = 16
QUANTIZE_WARPS = 4
SUPPORTED = (
    Params.FP32, Params.FP16_ZERO, Params.FP16_OFFSET, Params.FP32_OFFSET, Params.Q4_K
)  # fmt: skip


def multiplies(weight: TiledWeight | LinearForm) -> bool:
    """Return True if the kernel multiplies such weights."""
    return weight.kind is Codes.INT4 and weight.params_kind in SUPPORTED


def takes_sums(params_kind: Params) -> bool:
    """Return True if the kernel takes sums of x's codes over groups: weights have offsets."""
    return params_kind is not Params.FP32


def int8_constexprs(
    params_kind: Params,
    group_size: int,
    block_k: int,
    tile: MatmulTile,
    *,
    activation: Gating | None = None,
    asm: bool = True,
) -> dict[str, object]:
    """Return the compile-time arguments of `int8_matmul_kernel`."""
    order = TileOrder(Codes.INT4.bits)
    return {
        "AXES": order.int8_axes(groups=max(1, order.tile_k // group_size)),
        "PARAMS": params_kind.value,
        "RECORD": record_words(params_kind, block_k),
        "GROUP": group_size,
        **gate_constexprs(activation),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "STAGES": tile.num_stages,
        "ASM": asm,
    }


def quantize_constexprs(group_size: int, block_k: int) -> dict[str, object]:
    """Return the compile-time arguments of `quantize_inputs_kernel`."""
    return {"GROUP": group_size, "BLOCK_M": QUANTIZE_BLOCK_M, "BLOCK_K": block_k}
