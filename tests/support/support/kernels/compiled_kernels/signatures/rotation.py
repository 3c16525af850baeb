"""The rotation of inputs, as it is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import KernelSignature

from appliance.kernels.gpu.target import LEAST_DEPENDENT
from appliance.kernels.rotation.launch import NUM_WARPS, rotate_constexprs


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    yield rotate_signature(early=False)
    if capability >= LEAST_DEPENDENT:
        yield rotate_signature(early=True)


def rotate_signature(*, early: bool) -> KernelSignature:
    """How `rotate_kernel` is compiled for BF16 activations."""
    return KernelSignature(
        name=f"rotation bf16{' early' * early}",
        module="appliance.kernels.rotation.kernel",
        function="rotate_kernel",
        types={"out_ptr": "*bf16", "x_ptr": "*bf16", "in_features": "i32", "x_stride": "i32"},
        constexprs=dict(rotate_constexprs(early=early)),
        multiples_of_16=frozenset({"in_features", "x_stride"}),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
