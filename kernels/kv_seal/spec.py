"""What is compiled ahead of time of sealing."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.kernels.kv_page.layout import DIM_STEP, page_bytes, stored_dims
from appliance.kernels.signature import MOST_COMPILED, KernelSignature

NUM_WARPS = 4
HEAD_DIMS = (128, 64, 256)


def constexprs(head_dim: int) -> dict[str, int]:
    """What `seal_kernel` is specialized for."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(DIM_STEP, 1 << (head_dim - 1).bit_length()),
        "HEAD_DIM_STORED": stored_dims("int4-sealed", head_dim),
        "CLOSED_BYTES": page_bytes("int4-sealed", head_dim),
        "OPEN_BYTES": page_bytes("int8", head_dim),
    }


def signatures(capability: int) -> Iterator[KernelSignature]:
    """All that is compiled and gated for one compute capability (86 is 8.6)."""
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
            num_warps=NUM_WARPS,
            num_stages=1,
        )
