"""The signatures of sealing that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.kv_seal.launch import constexprs, num_warps

HEAD_DIMS = (128, 64, 256, 512)


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for head_dim in HEAD_DIMS if capability == MOST_COMPILED else HEAD_DIMS[:1]:
        yield KernelSignature(
            name=f"kv_seal head_dim {head_dim}",
            module="appliance.kernels.kv_seal.kernel",
            function="seal_kernel",
            types={
                "closed_ptr": "*u8",
                "closed_halves_ptr": "*fp16",
                "open_ptr": "*u8",
                "open_halves_ptr": "*fp16",
                "moves_ptr": "*i64",
                "num_kv_heads": "i32",
            },
            constexprs=constexprs(head_dim),
            multiples_of_16=frozenset(),
            num_warps=num_warps(head_dim),
            num_stages=1,
        )
