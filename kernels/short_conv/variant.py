"""Specializes the short convolution's kernel. Imports no torch."""

from __future__ import annotations

WARPS = 4
# Of a program: 16 bytes a thread of bfloat16 rows. The first block of a sequence's rows alone reads
# the state, so it has at least as many rows as the state where there is a second one.
_DECODE = (1, 1024)
_PROMPT = (16, 128)


def conv_constexprs(taps: int, longest: int) -> dict[str, int]:
    """Return the compile-time arguments for spans of at most so many rows."""
    block_t, block_w = _DECODE if longest == 1 else _PROMPT
    assert longest == 1 or taps <= block_t, taps
    return {"TAPS": taps, "BLOCK_T": block_t, "BLOCK_W": block_w}
