"""Specializes the widening of tiles. Imports no torch."""

from __future__ import annotations

WARPS = 4
_BLOCK_K = 128


def widen_constexprs(bits: int, group: int) -> dict[str, int]:
    """Return the compile-time arguments for codes of some bits in groups of inputs."""
    return {"BITS": bits, "GROUP": group, "BLOCK_K": _BLOCK_K}
