"""How the recurrent kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import KernelSignature
from support.kernels.compiled_kernels.signatures.packed_matmul import LIKE_MOST_COMPILED

from appliance.kernels.recurrence.variant import (
    MOST_REGISTERS,
    RELATE_WARPS,
    ROW_WARPS,
    pass_constexprs,
    pass_warps,
    relate_constexprs,
    row_constexprs,
)

MODULE = "appliance.kernels.recurrence.kernel"
# Whether rows correct the state, heads per key head, elements of a key, of a value.
SHAPES = {
    "gated_delta qwen3_5 128 x 128 shared by 2": (True, 2, 128, 128),
    "selective_scan nemotron_h 128 x 64 shared by 8": (False, 8, 128, 64),
}
KEYS = {
    **{f"{name}_ptr": "*fp32" for name in ("query", "key", "decay", "share")},
    **{f"{name}_ptr": "*i64" for name in ("first", "lens")},
    **dict.fromkeys(("first_stride", "query_stride", "key_stride", "num_heads"), "i32"),
    "scale": "fp32",
}
VALUES = {
    **{f"{name}_ptr": "*fp32" for name in ("out", "value", "state")},
    "slots_ptr": "*i64",
    "goes_on_ptr": "*i1",
    "value_stride": "i32",
}
PAIRS = {"reads_ptr": "*fp32", "chunk_starts_ptr": "*i64"}
STRIDES = frozenset({"query_stride", "key_stride", "num_heads"})


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for name in SHAPES:
        yield row_signature(name)
        if capability not in LIKE_MOST_COMPILED:
            yield from chunk_signatures(name, capability)


def row_signature(name: str) -> KernelSignature:
    """How the kernel that processes rows one by one is compiled."""
    corrects = SHAPES[name][0]
    return KernelSignature(
        name=name,
        module=MODULE,
        function="row_kernel",
        types=KEYS | VALUES,
        constexprs=row_constexprs(*SHAPES[name]),
        multiples_of_16=STRIDES | {"value_stride"},
        num_warps=ROW_WARPS,
        num_stages=1,
        max_registers=None if corrects else MOST_REGISTERS,
    )


def chunk_signatures(name: str, capability: int) -> Iterator[KernelSignature]:
    """How the kernels that process chunks of rows are compiled."""
    corrects, shared, key_dim, value_dim = SHAPES[name]
    unused: dict[str, None] = {} if corrects else {"solves_ptr": None}
    pairs = PAIRS | ({"solves_ptr": "*fp32"} if corrects else {})
    yield KernelSignature(
        name=f"{name} relate",
        module=MODULE,
        function="relate_kernel",
        types=KEYS | pairs | {"chunk_spans_ptr": "*i64"},
        constexprs={**relate_constexprs(corrects, shared, key_dim), **unused},
        multiples_of_16=STRIDES,
        num_warps=RELATE_WARPS,
        num_stages=1,
    )
    yield KernelSignature(
        name=f"{name} pass",
        module=MODULE,
        function="pass_kernel",
        types=KEYS | VALUES | pairs,
        constexprs={**pass_constexprs(corrects, shared, key_dim, value_dim), **unused},
        multiples_of_16=STRIDES | {"value_stride"},
        num_warps=pass_warps(capability),
        num_stages=1,
    )
