"""The signatures of block moves that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import KernelSignature

from appliance.kernels.block_copy.launch import BLOCK, NUM_WARPS


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield the only signature, for a compute capability (86 is 8.6)."""
    assert capability
    yield KernelSignature(
        name="block_copy",
        module="appliance.kernels.block_copy.kernel",
        function="block_copy_kernel",
        types={"words_ptr": "*i32", "layers_ptr": "*i64", "moves_ptr": "*i64"},
        constexprs={"BLOCK": BLOCK},
        multiples_of_16=frozenset(),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
