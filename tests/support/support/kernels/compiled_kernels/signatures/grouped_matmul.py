"""Named shapes of the grouped matmul, and the signatures that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature
from support.kernels.compiled_kernels.signatures.packed_matmul import (
    INT4_OFFSET,
    INT4_SHORT,
    INT4_SYMMETRIC,
    INT4_ZERO,
    LIKE_MOST_COMPILED,
    MXFP4,
    MatmulCase,
    ggml_case,
)

from appliance.kernels.activation import Activation, gate_constexprs
from appliance.kernels.grouped_matmul.launch import ADD_BLOCK, INPUT_BLOCK
from appliance.kernels.grouped_matmul.sorted_pairs import parts_at_once
from appliance.kernels.grouped_matmul.variant import (
    CHUNK,
    DENSE_BLOCK_K,
    TILES,
    dense_constexprs,
    packed_constexprs,
    without_cap,
)
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import MatmulTile
from appliance.kernels.packed_matmul.variant import takes_sums
from appliance.kernels.weight_codes.order import TileOrder

MODULE = "appliance.kernels.grouped_matmul.kernel"
MODEL = "qwen3_30b_a3b"  # 128 experts of 768 on 2048; a token uses 8
TOP_K, NUM_EXPERTS = 8, 128
FP8 = MatmulCase(Codes.FP8, 0, Params.NONE)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for tile in TILES:
        yield grouped_signature(INT4_ZERO, tile)
    if capability in LIKE_MOST_COMPILED:
        return
    for tile in TILES:
        yield grouped_signature(MXFP4, tile)
    for tile in TILES[:3]:
        yield grouped_signature(INT4_SYMMETRIC, tile)
        yield grouped_signature(INT4_OFFSET, tile)
    yield grouped_signature(INT4_SHORT, TILES[0])
    yield grouped_signature(FP8, TILES[0])
    yield grouped_signature(ggml_case("Q4_K"), TILES[0])
    yield grouped_signature(ggml_case("Q6_K"), TILES[3])
    yield dense_signature(TILES[0])
    yield dense_signature(TILES[3])
    if capability == MOST_COMPILED:
        yield from sort_signatures(TILES[0])
        yield add_signature()
        yield add_signature(gated=True)
        yield order_signature()
        yield weigh_signature()


def grouped_signature(case: MatmulCase, tile: MatmulTile) -> KernelSignature:
    """How `grouped_matmul_kernel` is compiled for packed experts, with a tile."""
    tile = without_cap(tile, case.kind, case.group_size)
    fixed = packed_constexprs(case.kind, case.params_kind, case.group_size, 128, tile)
    types = {"weight_ptr": "*i32"}
    if case.params_kind is not Params.NONE:
        types["params_ptr"] = "*i32"
    if case.params_kind in (Params.NONE, Params.HALVES):
        types["channel_scale_ptr"] = "*fp32"
    spans_tiles = case.group_size >= TileOrder(case.kind.bits).tile_k
    if takes_sums(case.params_kind, tile.max_rows) and spans_tiles:
        types |= {"sums_ptr": "*fp32", "sums_stride": "i32"}
    group = f"g{case.group_size}" if case.group_size else "per channel"
    name = f"{case.kind.value} {group} {case.params_kind.value}"
    return _signature(name, types, fixed, tile, tile.block_n * 128)


def dense_signature(tile: MatmulTile) -> KernelSignature:
    """How `grouped_matmul_kernel` is compiled for dense experts, with a tile."""
    elements = tile.block_n * DENSE_BLOCK_K
    return _signature("dense", {"weight_ptr": "*bf16"}, dense_constexprs(tile), tile, elements)


def _signature(
    form: str, types: dict[str, str], fixed: dict[str, object], tile: MatmulTile, elements: int
) -> KernelSignature:
    pointers = {"out_ptr": "*bf16", "x_ptr": "*bf16", "pairs_ptr": "*i32", "experts_ptr": "*i32"}
    sizes = ("out_features", "in_features", "x_stride", "tiles_n", "blocks_k")
    optional = {"params_ptr", "channel_scale_ptr", "bias_ptr", "sums_ptr", "sums_stride"}
    gating = gate_constexprs(None if form.startswith("fp8") else Activation.SILU)
    return KernelSignature(
        name=f"grouped_matmul {MODEL} gate_up {form} bf16 rows {tile.block_m}",
        module=MODULE,
        function="grouped_matmul_kernel",
        types={**pointers, **types, **dict.fromkeys(sizes, "i32")},
        constexprs={**fixed, **gating, "SHARE": TOP_K, **dict.fromkeys(optional - types.keys())},
        multiples_of_16=frozenset(
            {"out_features", "in_features", "x_stride"} | types.keys() & {"sums_stride"}
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
        loop_elements=elements // (32 * tile.num_warps),
    )


def sort_signatures(tile: MatmulTile) -> Iterator[KernelSignature]:
    """How the kernels that sort pairs are compiled."""
    ids = {"counts_ptr": "*i32", "ids_ptr": "*i64", "num_pairs": "i32"}
    yield KernelSignature(
        name=f"grouped_matmul {MODEL} count",
        module=MODULE,
        function="count_kernel",
        types=ids,
        constexprs={"CHUNK": CHUNK},
        multiples_of_16=frozenset(),
        num_warps=4,
        num_stages=1,
    )
    yield KernelSignature(
        name=f"grouped_matmul {MODEL} sort",
        module=MODULE,
        function="sort_kernel",
        types={
            "pairs_ptr": "*i32",
            "experts_ptr": "*i32",
            **ids,
            **dict.fromkeys(("num_parts", "num_blocks", "num_experts"), "i32"),
        },
        constexprs={
            "EXPERTS": NUM_EXPERTS,
            "PARTS": parts_at_once(32, NUM_EXPERTS),
            "BLOCK_M": tile.block_m,
            "CHUNK": CHUNK,
        },
        multiples_of_16=frozenset({"num_experts"}),
        num_warps=4,
        num_stages=1,
    )


def add_signature(*, gated: bool = False) -> KernelSignature:
    """How the weighted sum of the experts' outputs is compiled; `gated`: of some, and a shared one.

    As a rank of Qwen3-Next has them.
    """
    types = {"out_ptr": "*bf16", "y_ptr": "*bf16", "weights_ptr": "*fp32"}
    optional = {"ids_ptr": "*i64", "shared_ptr": "*bf16", "gate_ptr": "*fp32"}
    sizes = ("width", "num_experts", "shared_stride", "gate_stride")
    return KernelSignature(
        name=f"grouped_matmul {MODEL} sum {'of a part and a shared one ' if gated else ''}bf16",
        module=MODULE,
        function="add_experts_kernel",
        types=types | (optional if gated else {}) | dict.fromkeys(sizes, "i32"),
        constexprs={
            "TOP_K": TOP_K,
            "BLOCK": ADD_BLOCK,
            **({} if gated else dict.fromkeys(optional)),
        },
        multiples_of_16=frozenset({"width", "shared_stride"}),
        num_warps=4,
        num_stages=1,
    )


def order_signature() -> KernelSignature:
    """How the kernel that reorders inputs to an expert's columns is compiled."""
    return _inputs_signature("order", {"order_ptr": "*i32"}, TOP_K)


def weigh_signature() -> KernelSignature:
    """How the kernel that weighs inputs is compiled, for one expert of a token."""
    return _inputs_signature("weigh", {"weights_ptr": "*fp32"}, 1)


def _inputs_signature(name: str, given: dict[str, str], share: int) -> KernelSignature:
    types = {"out_ptr": "*bf16", "x_ptr": "*bf16", "ids_ptr": "*i64"} | given
    optional = {"order_ptr", "weights_ptr"} - given.keys()
    return KernelSignature(
        name=f"grouped_matmul {MODEL} {name} bf16",
        module=MODULE,
        function="lay_out_inputs_kernel",
        types=types | dict.fromkeys(("in_features", "x_stride", "num_experts"), "i32"),
        constexprs={"SHARE": share, "BLOCK": INPUT_BLOCK, **dict.fromkeys(optional)},
        multiples_of_16=frozenset({"in_features", "x_stride"}),
        num_warps=4,
        num_stages=1,
    )
