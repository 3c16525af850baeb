"""Specializes the recurrent kernels, and chooses the rows that pass in chunks. Imports no torch."""

from __future__ import annotations

CHUNK = 64  # rows that pass through a state at once
FEWEST_CHUNKED = 16  # rows of a sequence that are worth a chunk; fewer pass one by one
EPSILON = 1e-6  # of the keys' and queries' length, as in the authors' kernels

ROW_BLOCK_V = 32  # values of a program: with 128 keys, 32 registers of each thread
ROW_WARPS = 4
MOST_REGISTERS = 96  # of a scan by rows: without a cap ptxas aims at 64, and spills two

# Of programs that take chunks. Keys are multiplied a few at a time: operands of the tensor cores
# take twice the registers, for the parts that tf32 leaves off are operands too.
RELATE_BLOCK_K = 16
RELATE_WARPS = 8
PASS_BLOCK_K = 32
PASS_BLOCK_V = 16


def pass_warps(capability: int) -> int:
    """Return the warps of `pass_kernel`: two warpgroups on one tile would spill."""
    return 4 if capability // 10 == 9 else 8


def rule_constexprs(corrects: bool, shared: int, key_dim: int) -> dict[str, int | float]:
    """Return the compile-time arguments that all kernels have.

    Args:
        corrects: whether a row corrects the state by its error, as the gated delta rule does, or
            adds to it, as the selective scan does.
        shared: heads of a key head.
        key_dim: numbers of a key.
    """
    return {"CORRECTS": corrects, "SHARED": shared, "KEY_DIM": key_dim, "EPSILON": EPSILON}


def row_constexprs(
    corrects: bool, shared: int, key_dim: int, value_dim: int
) -> dict[str, int | float]:
    """Return the compile-time arguments of `row_kernel`."""
    return rule_constexprs(corrects, shared, key_dim) | {
        "KEY_PADDED": 1 << (key_dim - 1).bit_length(),
        "VALUE_DIM": value_dim,
        "BLOCK_V": ROW_BLOCK_V,
        "FEWEST_CHUNKED": FEWEST_CHUNKED,
    }


def relate_constexprs(corrects: bool, shared: int, key_dim: int) -> dict[str, int | float]:
    """Return the compile-time arguments of `relate_kernel`."""
    return rule_constexprs(corrects, shared, key_dim) | {"BLOCK_K": RELATE_BLOCK_K, "CHUNK": CHUNK}


def pass_constexprs(
    corrects: bool, shared: int, key_dim: int, value_dim: int
) -> dict[str, int | float]:
    """Return the compile-time arguments of `pass_kernel`."""
    return rule_constexprs(corrects, shared, key_dim) | {
        "BLOCK_K": PASS_BLOCK_K,
        "VALUE_DIM": value_dim,
        "BLOCK_V": PASS_BLOCK_V,
        "FEWEST_CHUNKED": FEWEST_CHUNKED,
        "CHUNK": CHUNK,
    }
