"""How the int8 matmul, and the kernel that rounds its inputs, are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature
from support.kernels.compiled_kernels.signatures.packed_matmul import (
    DOWN,
    GATE_UP,
    INT4_OFFSET,
    INT4_SHORT,
    INT4_SYMMETRIC,
    INT4_ZERO,
    QKV,
    SHAPES,
    MatmulCase,
    MatmulShape,
    gate_words,
    ggml_case,
)

from appliance.kernels.activation import Activation
from appliance.kernels.int8_matmul.tiles import PROVEN, TILE
from appliance.kernels.int8_matmul.variant import (
    QUANTIZE_WARPS,
    int8_constexprs,
    quantize_constexprs,
    takes_sums,
)
from appliance.kernels.packed_matmul.tiled import Codes, Params

MODULE = "appliance.kernels.int8_matmul.kernel"
LONG = (GATE_UP, INT4_ZERO)
# Of a linear without offsets, in groups of 64 and of 32, and in the blocks of most files.
OTHERS = (
    (GATE_UP, INT4_SYMMETRIC),
    (QKV, MatmulCase(Codes.INT4, 64, Params.FP16_ZERO)),
    (DOWN, INT4_SHORT),
    (GATE_UP, ggml_case("Q4_K", Activation.SILU)),
)
# For the architecture that compiles all of them.
MORE = (
    (QKV, INT4_OFFSET),
    (QKV, MatmulCase(Codes.INT4, 64, Params.FP32)),
    (QKV, MatmulCase(Codes.INT4, 32, Params.FP32)),
    (QKV, MatmulCase(Codes.INT4, 32, Params.FP16_ZERO)),
    (DOWN, MatmulCase(Codes.INT4, 64, Params.FP32_OFFSET, bias=True)),
    (
        GATE_UP,
        MatmulCase(
            Codes.INT4, 128, Params.FP16_OFFSET, dtype="fp16", activation=Activation.SILU, bias=True
        ),
    ),
    (SHAPES[5], INT4_SHORT),  # blocks of 64 inputs
)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    if capability not in PROVEN:
        return
    yield matmul_signature(*LONG)
    for shape, case in OTHERS if capability != 89 else ():
        yield matmul_signature(shape, case)
    if capability == MOST_COMPILED:
        for shape, case in MORE:
            yield matmul_signature(shape, case)
        yield quantize_signature(32, has_sums=True)
        yield quantize_signature(128, has_sums=False)


def matmul_signature(shape: MatmulShape, case: MatmulCase) -> KernelSignature:
    """How `int8_matmul_kernel` is compiled for a weight."""
    block_k = 128 if shape.in_features % 128 == 0 else 64
    fixed = int8_constexprs(
        case.params_kind, case.group_size, block_k, TILE, activation=case.activation
    )
    types = {
        "out_ptr": f"*{case.dtype}",
        "x_ptr": "*i8",
        "x_scales_ptr": "*fp32",
        "codes_ptr": "*i32",
        "params_ptr": "*i32",
        "partial_ptr": "*fp32",
        "arrived_ptr": "*i32",
        "num_tokens": "i32",
        "out_features": "i32",
        "columns": "i32",
        "blocks_k": "i32",
    }
    if takes_sums(case.params_kind):
        types["sums_ptr"] = "*fp32"
    if case.bias:
        types["bias_ptr"] = "*fp32"
    more = gate_words(case) + " bias" * case.bias
    return KernelSignature(
        name=f"int8_matmul {shape.name} int4 g{case.group_size} {case.params_kind.value} "
        f"{case.dtype}{more} rows {TILE.max_rows}",
        module=MODULE,
        function="int8_matmul_kernel",
        types=types,
        constexprs={**fixed, **dict.fromkeys({"sums_ptr", "bias_ptr"} - types.keys())},
        multiples_of_16=frozenset({"out_features", "columns"}),
        num_warps=TILE.num_warps,
        num_stages=TILE.num_stages,
        max_registers=TILE.max_registers,
        loop_elements=TILE.block_n * block_k // (32 * TILE.num_warps),
    )


def quantize_signature(group_size: int, *, has_sums: bool) -> KernelSignature:
    """How `quantize_inputs_kernel` is compiled for BF16 activations."""
    types = {
        "codes_ptr": "*i8",
        "scales_ptr": "*fp32",
        "x_ptr": "*bf16",
        "num_tokens": "i32",
        "in_features": "i32",
        "x_stride": "i32",
        "columns": "i32",
    }
    if has_sums:
        types["sums_ptr"] = "*fp32"
    return KernelSignature(
        name=f"int8_matmul quantize g{group_size} bf16",
        module=MODULE,
        function="quantize_inputs_kernel",
        types=types,
        constexprs={
            **quantize_constexprs(group_size, 128),
            **dict.fromkeys({"sums_ptr"} - types.keys()),
        },
        multiples_of_16=frozenset({"in_features", "x_stride", "columns"}),
        num_warps=QUANTIZE_WARPS,
        num_stages=1,
        fuses=False,
    )
