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
    "gated_delta qwen3_5 128 x 128 shared by 2 fp16 states": (True, 2, 128, 128),
}
KEYS = {
    **{f"{name}_ptr": "*fp32" for name in ("query", "key", "rate")},
    **{f"{name}_ptr": "*i64" for name in ("first", "lens")},
    **dict.fromkeys(("first_stride", "query_stride", "key_stride", "num_heads"), "i32"),
    "scale": "fp32",
}
STEPS = {"step_ptr": "*bf16", "bias_ptr": "*fp32", "step_stride": "i32"}
VALUES = {
    **{f"{name}_ptr": "*fp32" for name in ("out", "value", "state")},
    "goes_on_ptr": "*i1",
    "value_stride": "i32",
}
SLOTS = {"slots_ptr": "*i64", "state_stride": "i32"}
IN_16_BITS = "fp16 states"
PAIRS = {"reads_ptr": "*fp32", "logs_ptr": "*fp32", "chunk_starts_ptr": "*i64"}
STRIDES = frozenset({"query_stride", "key_stride", "num_heads"})


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for name in SHAPES:
        yield row_signature(name)
        # Chunks pass through states in float32, whatever these are kept in.
        if capability not in LIKE_MOST_COMPILED and not _states(name):
            yield from chunk_signatures(name, capability)


def _share(*, corrects: bool) -> dict[str, str]:
    return {"share_ptr": "*bf16"} if corrects else {}


def _states(name: str) -> dict[str, str]:
    return {"state_ptr": "*fp16"} if name.endswith(IN_16_BITS) else {}


def row_signature(name: str) -> KernelSignature:
    """How the kernel that processes rows one by one is compiled."""
    corrects = SHAPES[name][0]
    return KernelSignature(
        name=name,
        module=MODULE,
        function="row_kernel",
        types=KEYS | STEPS | VALUES | SLOTS | _states(name) | _share(corrects=corrects),
        constexprs={**row_constexprs(*SHAPES[name]), **({} if corrects else {"share_ptr": None})},
        multiples_of_16=STRIDES | {"value_stride", "state_stride"},
        num_warps=ROW_WARPS,
        num_stages=1,
        max_registers=None if corrects else MOST_REGISTERS,
    )


def chunk_signatures(name: str, capability: int) -> Iterator[KernelSignature]:
    """How the kernels that process chunks of rows are compiled."""
    corrects, shared, key_dim, value_dim = SHAPES[name]
    unused = {} if corrects else {"solves_ptr": None}
    no_share = {} if corrects else {"share_ptr": None}
    pairs = PAIRS | ({"solves_ptr": "*fp32"} if corrects else {})
    yield KernelSignature(
        name=f"{name} relate",
        module=MODULE,
        function="relate_kernel",
        types=KEYS | STEPS | pairs | {"chunk_spans_ptr": "*i64"} | _share(corrects=corrects),
        constexprs={**relate_constexprs(corrects, shared, key_dim), **unused, **no_share},
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
