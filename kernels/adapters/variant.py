"""Compile-time choices of the adapters' kernels. Imports no triton."""

from __future__ import annotations

from appliance.kernels.adapters.factors import BLOCK_N, LEAST_RANK, MOST_RANK

BLOCK_K = 64
MOST_SPLITS = 8
_LEAST_SPAN = 256
STAGES = 3
NUM_WARPS = 4


def span_of(in_features: int) -> int:
    """Return the inputs that a program shrinks: by the place alone, so sums have one order."""
    return max(_LEAST_SPAN, -(-in_features // (MOST_SPLITS * BLOCK_K)) * BLOCK_K)


def splits_of(in_features: int) -> int:
    """Return the number of programs among which inputs are split."""
    return -(-in_features // span_of(in_features))


def shrink_constexprs(rank: int, block_m: int, in_features: int) -> dict[str, object]:
    """Return the compile-time arguments of `shrink_kernel`."""
    return {
        "RANK": rank,
        "BLOCK_M": block_m,
        "BLOCK_R": min(rank, MOST_RANK),
        "BLOCK_K": BLOCK_K,
        "EVEN_K": in_features % BLOCK_K == 0,
        "STAGES": STAGES,
    }


def expand_constexprs(rank: int, block_m: int, in_features: int) -> dict[str, object]:
    """Return the compile-time arguments of `expand_kernel`."""
    return {
        "SPLITS": splits_of(in_features),
        "RANK": rank,
        "BLOCK_M": block_m,
        "BLOCK_N": BLOCK_N,
        "BLOCK_R": LEAST_RANK,  # so that of a small adapter no more than its own is read
    }
