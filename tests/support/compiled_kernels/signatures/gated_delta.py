"""How the gated delta rule is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.kernels.gated_delta.launch import NUM_WARPS, constexprs
from compiled_kernels.signature import KernelSignature


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    del capability
    tensors = ("out", "query", "key", "value", "decay", "beta", "state")
    strides = ("first_stride", "query_stride", "key_stride", "value_stride")
    yield KernelSignature(
        name="gated_delta qwen3_5 128 x 128 shared by 2",
        module="appliance.kernels.gated_delta.kernel",
        function="gated_delta_kernel",
        types={
            **{f"{name}_ptr": "*fp32" for name in tensors},
            **{f"{name}_ptr": "*i64" for name in ("first", "lens", "slots")},
            "goes_on_ptr": "*i1",
            **dict.fromkeys((*strides, "num_value_heads"), "i32"),
            "scale": "fp32",
        },
        constexprs=constexprs(2, 128, 128),
        multiples_of_16=frozenset({*strides[1:], "num_value_heads"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
