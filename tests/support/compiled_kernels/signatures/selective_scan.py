"""How the selective scan is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.kernels.selective_scan.launch import MAX_REGISTERS, NUM_WARPS, constexprs
from compiled_kernels.signature import KernelSignature


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    del capability
    tensors = ("out", "value", "key", "query", "size", "rates", "state")
    strides = ("first_stride", "value_stride", "key_stride", "query_stride")
    yield KernelSignature(
        name="selective_scan nemotron_h 128 x 64 shared by 8",
        module="appliance.kernels.selective_scan.kernel",
        function="selective_scan_kernel",
        types={
            **{f"{name}_ptr": "*fp32" for name in tensors},
            **{f"{name}_ptr": "*i64" for name in ("first", "lens", "slots")},
            "goes_on_ptr": "*i1",
            **dict.fromkeys((*strides, "num_heads"), "i32"),
        },
        constexprs=constexprs(8, 128, 64),
        multiples_of_16=frozenset({*strides[1:], "num_heads"}),
        num_warps=NUM_WARPS,
        num_stages=1,
        max_registers=MAX_REGISTERS,
    )
