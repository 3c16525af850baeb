"""Named shapes of adapters, and how their kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.adapters.variant import (
    NUM_WARPS,
    STAGES,
    expand_constexprs,
    shrink_constexprs,
)
from appliance.kernels.grouped_matmul.variant import TILES

MODULE = "appliance.kernels.adapters.kernel"
MODEL, IN_FEATURES = "llama3_8b", 4096
RANKS = (16, 64)
_COMMON = {
    "ranks_ptr": "*i32",
    "rows_ptr": "*i32",
    "slots_ptr": "*i32",
    **dict.fromkeys(("num_tokens", "slot_stride", "parts_stride", "num_parts"), "i32"),
}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for rank in RANKS if capability == MOST_COMPILED else RANKS[:1]:
        for tile in (TILES[0], TILES[-1]):
            yield shrink_signature(rank, tile.block_m)
            yield expand_signature(rank, tile.block_m)


def shrink_signature(rank: int, block_m: int) -> KernelSignature:
    """How `shrink_kernel` is compiled for the inputs of attention."""
    floats = {"shrunk_ptr": "*fp32", "x_ptr": "*bf16", "shrink_ptr": "*bf16"}
    sizes = dict.fromkeys(("in_features", "x_stride", "span"), "i32")
    fixed = shrink_constexprs(rank, block_m, IN_FEATURES)
    return KernelSignature(
        name=f"adapters {MODEL} shrink rank {rank} bf16 rows {block_m}",
        module=MODULE,
        function="shrink_kernel",
        types={**floats, **_COMMON, **sizes},
        constexprs=fixed,
        multiples_of_16=frozenset({"in_features", "x_stride", "slot_stride", "span"}),
        num_warps=NUM_WARPS,
        num_stages=STAGES,
    )


def expand_signature(rank: int, block_m: int) -> KernelSignature:
    """How `expand_kernel` is compiled for the outputs of attention's inputs."""
    floats = {"out_ptr": "*bf16", "shrunk_ptr": "*fp32", "expand_ptr": "*bf16"}
    others = {"scales_ptr": "*fp32", "blocks_ptr": "*i32", "out_stride": "i32"}
    return KernelSignature(
        name=f"adapters {MODEL} expand rank {rank} bf16 rows {block_m}",
        module=MODULE,
        function="expand_kernel",
        types={**floats, **others, **_COMMON},
        constexprs=expand_constexprs(rank, block_m, IN_FEATURES),
        multiples_of_16=frozenset({"out_stride", "slot_stride"}),
        num_warps=NUM_WARPS,
        num_stages=STAGES,
    )
