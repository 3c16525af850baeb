"""Tiles of the FP8 matmul, named shapes, and the signatures that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature
from support.kernels.compiled_kernels.signatures.packed_matmul import (
    DOWN,
    LIKE_MOST_COMPILED,
    QKV,
    MatmulCase,
    MatmulShape,
    distinct_tiles,
    matmul_signature,
    summing_at_once,
)

from appliance.kernels.fp8_matmul.launch import (
    FP8_TILES,
    LEAST_NATIVE,
    QUANTIZE_BLOCK,
    fp8_constexprs,
)
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import MatmulTile, architecture

MODULE = "appliance.kernels.fp8_matmul.kernel"

PER_CHANNEL = MatmulCase(Codes.FP8, 0, Params.NONE)
BLOCKWISE = MatmulCase(Codes.FP8, 128, Params.FP32)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (89 is 8.9)."""
    table = architecture(capability)
    assert table is not None
    if capability not in LIKE_MOST_COMPILED:
        for tile in reversed(distinct_tiles(table.one_sum)):
            plain = summing_at_once(tile, capability)
            yield matmul_signature(DOWN, PER_CHANNEL, plain, capability)
        yield matmul_signature(DOWN, BLOCKWISE, table.tiles[1], capability)
    if capability == MOST_COMPILED:
        yield quantize_signature()
    if capability >= LEAST_NATIVE:
        for tile in FP8_TILES[capability]:
            yield fp8_signature(QKV, tile, capability, blockwise=tile.block_m > 16)


def fp8_signature(
    shape: MatmulShape, tile: MatmulTile, capability: int, *, blockwise: bool
) -> KernelSignature:
    """How `fp8_matmul_kernel` is compiled for a weight, with a tile."""
    pointers = {"x_ptr": "*u8", "x_scales_ptr": "*fp32", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
    sizes = ("num_tokens", "out_features", "in_features")
    form = "blockwise" if blockwise else "per channel"
    return KernelSignature(
        name=f"fp8_matmul {shape.name} {form} bf16 tile {tile.block_m}",
        module=MODULE,
        function="fp8_matmul_kernel",
        types={
            "out_ptr": "*bf16",
            **pointers,
            "partial_ptr": "*fp32",
            "arrived_ptr": "*i32",
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            **fp8_constexprs(shape.in_features, tile, blockwise=blockwise, native=True),
            "bias_ptr": None,
        },
        multiples_of_16=frozenset({"out_features", "in_features"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def quantize_signature() -> KernelSignature:
    """How `quantize_rows_kernel` is compiled for BF16 activations."""
    return KernelSignature(
        name="fp8_matmul quantize rows bf16",
        module=MODULE,
        function="quantize_rows_kernel",
        types={
            "codes_ptr": "*u8",
            "scales_ptr": "*fp32",
            "x_ptr": "*bf16",
            "in_features": "i32",
            "x_stride": "i32",
        },
        constexprs={"BLOCK": QUANTIZE_BLOCK},
        multiples_of_16=frozenset({"in_features", "x_stride"}),
        num_warps=4,
        num_stages=1,
    )
