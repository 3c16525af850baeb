"""Named shapes of the packed matmul, and the signatures that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.activation import Activation
from appliance.kernels.gpu.target import LEAST_DEPENDENT
from appliance.kernels.packed_matmul.ggml_tiles import GGML_TILES
from appliance.kernels.packed_matmul.sums import SUMS_BLOCK_K, SUMS_BLOCK_M
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import (
    SHORT_GROUP_TILES,
    MatmulTile,
    architecture,
    choose_tile,
)
from appliance.kernels.packed_matmul.variant import (
    DENSE_BLOCK_M,
    LOOKUP_BLOCK_M,
    ROWS_WARPS,
    constexprs_of,
    dequantize_constexprs,
    may_fold,
    rows_constexprs,
    takes_sums,
    tiling_group,
)

MODULE = "appliance.kernels.packed_matmul.kernel"


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A linear of a model."""

    name: str
    in_features: int
    out_features: int


SHAPES = (
    MatmulShape("llama_8b qkv", 4096, 6144),
    MatmulShape("llama_8b o", 4096, 4096),
    MatmulShape("llama_8b gate_up", 4096, 28672),
    MatmulShape("llama_8b down", 14336, 4096),
    MatmulShape("smollm2_135m down", 1536, 576),
    MatmulShape("smollm2_135m gate_up", 576, 3072),
    MatmulShape("8192x8192", 8192, 8192),
    MatmulShape("8192x28672", 8192, 28672),
)


@dataclass(frozen=True, slots=True)
class MatmulCase:
    """What distinguishes one compiled kernel from another, besides the shape and the tile."""

    kind: Codes
    group_size: int
    params_kind: Params
    dtype: str = "bf16"
    activation: Activation | None = None  # of gate and up
    bias: bool = False


QKV, GATE_UP, DOWN, SMALL = SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[4]
INT4_OFFSET = MatmulCase(Codes.INT4, 128, Params.FP16_OFFSET)
INT4_ZERO = MatmulCase(Codes.INT4, 128, Params.FP16_ZERO)
MXFP4 = MatmulCase(Codes.FP4, 32, Params.HALVES)
NVFP4 = MatmulCase(Codes.FP4, 16, Params.HALVES)
INT4_SYMMETRIC = MatmulCase(Codes.INT4, 128, Params.FP32)
INT4_SHORT = MatmulCase(Codes.INT4, 32, Params.FP16_OFFSET)
INT8 = MatmulCase(Codes.INT8, 32, Params.FP32)
TRELLIS = tuple(MatmulCase(kind, 0, Params.NONE) for kind in Codes if kind.is_trellis)
INT8_LONG = MatmulCase(Codes.INT8, 128, Params.FP32)
# GGML's types: those of most files, and the others.
MOST_FILES = ("Q4_K", "Q5_K", "Q6_K")
OTHER_FILES = ("Q2_K", "Q3_K", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XXS", "IQ2_XS")
# Their code differs from that of MOST_COMPILED by hardly an instruction.
LIKE_MOST_COMPILED = (80, 89)
# For the architecture that compiles all of them.
OTHERS = (
    (
        GATE_UP,
        MatmulCase(Codes.INT4, 128, Params.FP16_OFFSET, activation=Activation.SILU, bias=True),
    ),
    (DOWN, MatmulCase(Codes.INT4, 64, Params.FP16_OFFSET, dtype="fp16")),
    (DOWN, MatmulCase(Codes.INT4, 64, Params.FP32_OFFSET, bias=True)),
    (QKV, MatmulCase(Codes.INT4, 32, Params.FP32)),
    (QKV, MatmulCase(Codes.INT8, 128, Params.FP16_OFFSET)),
    (SMALL, INT4_SHORT),
    (GATE_UP, replace(INT4_SHORT, activation=Activation.GELU_TANH)),
)
MOST_ROWS = 512  # with more, tiles differ only in their rows, see `choose_tile`


def ggml_case(name: str, activation: Activation | None = None) -> MatmulCase:
    form = GGML_TILES[name]
    return MatmulCase(form.kind, form.group_size, form.params_kind, activation=activation)


# For many rows.
SHORT_GROUPS = (
    (DOWN, INT4_SHORT),
    (QKV, INT8),
    (GATE_UP, ggml_case("Q4_K", Activation.SILU)),
    *((DOWN, ggml_case(name)) for name in (*MOST_FILES, *OTHER_FILES)),
)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    table = architecture(capability)
    assert table is not None
    distinct = distinct_tiles(table.one_sum)
    for tile in distinct:
        yield matmul_signature(GATE_UP, INT4_ZERO, tile, capability)
    if capability in LIKE_MOST_COMPILED:
        return
    for tile in distinct:
        yield matmul_signature(GATE_UP, INT4_SYMMETRIC, tile, capability)
    for tile in (*table.tiles[:2], distinct[0]):
        yield matmul_signature(GATE_UP, INT4_OFFSET, tile, capability)
    for tile in distinct_tiles(table.tiles):
        if tile not in distinct:
            yield matmul_signature(QKV, INT8_LONG, tile, capability)
    # Only the code before the loop differs, and all others share that code.
    if capability >= LEAST_DEPENDENT:
        yield matmul_signature(GATE_UP, INT4_ZERO, table.tiles[0], capability, early=True)
    for case in (MXFP4, NVFP4):
        for tile in distinct:
            yield matmul_signature(GATE_UP, case, summing_at_once(tile, capability), capability)
    for case in TRELLIS:
        for tile in chosen_tiles(case, capability):
            yield matmul_signature(DOWN, case, tile, capability)
    for tile in SHORT_GROUP_TILES[:3]:
        yield matmul_signature(DOWN, INT4_SHORT, tile, capability)
        yield matmul_signature(QKV, INT8, tile, capability)
        for name in MOST_FILES:
            yield matmul_signature(DOWN, ggml_case(name), tile, capability)
    for shape, case in SHORT_GROUPS:
        yield matmul_signature(shape, case, table.short_groups[-1], capability)
    if capability == MOST_COMPILED:
        for shape, case in OTHERS:
            yield matmul_signature(shape, case, table.tiles[0], capability)
        yield sums_signature(32)
        for case in (INT4_SHORT, INT8, NVFP4, *TRELLIS):
            yield dequantize_signature(case)
        for name in OTHER_FILES:
            yield matmul_signature(DOWN, ggml_case(name), SHORT_GROUP_TILES[0], capability)
        for name in ("Q4_K", "Q6_K", "IQ4_NL"):
            yield rows_signature(name, looked_up=True)
            yield rows_signature(name, looked_up=False)


def early_signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield what the product can launch early on one architecture: each format with each tile."""
    long = (INT4_ZERO, INT4_OFFSET, INT4_SYMMETRIC, INT8_LONG)
    per_channel = tuple(MatmulCase(kind, 0, Params.NONE) for kind in (Codes.INT4, Codes.INT8))
    weights = [
        *((GATE_UP, case) for case in (*long, *per_channel, MXFP4, NVFP4, *TRELLIS)),
        *(
            (GATE_UP, replace(case, activation=Activation.SILU, bias=True))
            for case in (INT4_OFFSET, NVFP4)
        ),
        *((DOWN, case) for case in (INT4_SHORT, INT8)),
        *((DOWN, ggml_case(name)) for name in (*MOST_FILES, *OTHER_FILES)),
        *OTHERS,
    ]
    for shape, case in weights:
        for tile in chosen_tiles(case, capability):
            yield matmul_signature(shape, case, tile, capability, early=True)
    for group_size in (16, 32, 64, 128):
        yield sums_signature(group_size, early=True)


def chosen_tiles(case: MatmulCase, capability: int) -> list[MatmulTile]:
    """Return the tiles that the product chooses for a weight, for all numbers of rows."""
    group, folds = tiling_group(case.kind, case.group_size), may_fold(case.kind, case.group_size)
    found = [
        choose_tile(rows, capability, group, may_fold=folds) for rows in range(1, MOST_ROWS + 1)
    ]
    return distinct_tiles(tuple(dict.fromkeys(found)))


def distinct_tiles(tiles: tuple[MatmulTile, ...]) -> list[MatmulTile]:
    """Return the first of the tiles that differ only in rows, from most rows to fewest."""
    return list({replace(tile, max_rows=0): tile for tile in reversed(tiles)}.values())


def summing_at_once(tile: MatmulTile, capability: int) -> MatmulTile:
    """Return the tile for as many rows where no group has a product of its own."""
    return choose_tile(tile.max_rows, capability, 0)


def gate_words(case: MatmulCase) -> str:
    """Return what the name of a row says of the gate."""
    if case.activation is None:
        return ""
    return " gated" if case.activation is Activation.SILU else f" gated by {case.activation.value}"


def matmul_signature(
    shape: MatmulShape,
    case: MatmulCase,
    tile: MatmulTile,
    capability: int,
    *,
    early: bool = False,
) -> KernelSignature:
    """How `packed_matmul_kernel` is compiled for a weight, with a tile."""
    activation = f"*{case.dtype}"
    block_k = 128 if shape.in_features % 128 == 0 else 64
    fixed = constexprs_of(
        case.kind,
        case.params_kind,
        case.group_size,
        block_k,
        tile,
        activation=case.activation,
        early=early,
    )
    types = {
        "out_ptr": activation,
        "x_ptr": activation,
        "codes_ptr": "*i32",
        "partial_ptr": "*fp32",
        "arrived_ptr": "*i32",
        "num_tokens": "i32",
        "out_features": "i32",
        "in_features": "i32",
        "x_stride": "i32",
        "sums_stride": "i32",
        "blocks_k": "i32",
    }
    if case.params_kind in (Params.NONE, Params.HALVES):
        types["channel_scale_ptr"] = "*fp32"
    if case.params_kind is not Params.NONE:
        types["params_ptr"] = "*i32"
    if not fixed["FOLDED"] and takes_sums(case.params_kind, tile.max_rows):
        types["sums_ptr"] = "*fp32"
    if case.bias:
        types["bias_ptr"] = "*fp32"
    optional = {"params_ptr", "channel_scale_ptr", "bias_ptr", "sums_ptr"}
    group = f"g{case.group_size}" if case.group_size else "per channel"
    more = gate_words(case) + " bias" * case.bias + " early" * early
    return KernelSignature(
        name=f"packed_matmul {shape.name} {case.kind.value} {group} {case.params_kind.value} "
        f"{case.dtype}{more} rows {tile.max_rows}",
        module=MODULE,
        function="packed_matmul_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys(optional - types.keys())},
        multiples_of_16=frozenset({"x_stride", "out_features", "in_features", "sums_stride"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
        loop_elements=tile.block_n * block_k // (32 * tile.num_warps),
    )


def sums_signature(group_size: int, *, early: bool = False) -> KernelSignature:
    """How `group_sums_kernel` is compiled for BF16 activations."""
    return KernelSignature(
        name=f"packed_matmul sums g{group_size} bf16{' early' * early}",
        module=MODULE,
        function="group_sums_kernel",
        types={
            "sums_ptr": "*fp32",
            "x_ptr": "*bf16",
            "num_tokens": "i32",
            "in_features": "i32",
            "x_stride": "i32",
            "sums_stride": "i32",
            "num_groups": "i32",
        },
        constexprs={
            "GROUP": group_size,
            "BLOCK_M": SUMS_BLOCK_M,
            "BLOCK_K": SUMS_BLOCK_K,
            "EARLY": early,
        },
        multiples_of_16=frozenset({"x_stride", "sums_stride", "in_features"}),
        num_warps=4,
        num_stages=1,
    )


def dequantize_signature(case: MatmulCase) -> KernelSignature:
    """How `dequantize_kernel` is compiled for a dense weight in BF16."""
    types = {"out_ptr": "*bf16", "codes_ptr": "*i32", "params_ptr": "*i32"}
    if case.params_kind is Params.NONE:
        del types["params_ptr"]
    if case.params_kind in (Params.NONE, Params.HALVES):
        types["channel_scale_ptr"] = "*fp32"
    sizes = ("i_first_tile", "rows", "in_features", "blocks_k")
    fixed = dequantize_constexprs(case.kind, case.params_kind, case.group_size, 128)
    return KernelSignature(
        name=f"packed_matmul dequantize {case.kind.value} g{case.group_size} bf16",
        module=MODULE,
        function="dequantize_kernel",
        types={**types, **dict.fromkeys(sizes, "i32")},
        constexprs={
            **fixed,
            **dict.fromkeys({"params_ptr", "channel_scale_ptr"} - types.keys()),
        },
        multiples_of_16=frozenset({"in_features", "rows"}),
        num_warps=4,
        num_stages=1,
    )


def rows_signature(type_name: str, *, looked_up: bool) -> KernelSignature:
    """How `rows_kernel` is compiled for BF16: rows by number, or consecutive rows."""
    form = GGML_TILES[type_name]
    block_m = LOOKUP_BLOCK_M if looked_up else DENSE_BLOCK_M
    fixed = rows_constexprs(form.kind, form.params_kind, form.group_size, 128, block_m)
    types = {"out_ptr": "*bf16", "codes_ptr": "*i32", "params_ptr": "*i32"}
    if looked_up:
        types["ids_ptr"] = "*i64"
    sizes = ("i_first", "num_rows", "in_features", "blocks_k")
    return KernelSignature(
        name=f"packed_matmul rows {type_name}{' looked up' * looked_up} bf16",
        module=MODULE,
        function="rows_kernel",
        types={**types, **dict.fromkeys(sizes, "i32")},
        constexprs={**fixed, **dict.fromkeys({"ids_ptr"} - types.keys())},
        multiples_of_16=frozenset({"in_features"}),
        num_warps=ROWS_WARPS,
        num_stages=1,
    )
