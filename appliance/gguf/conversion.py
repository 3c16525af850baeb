"""Converts Q4_0, Q4_1 and Q8_0 to the packed form, without loss: groups of 32, float16 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

GROUP_SIZE = 32
_LOW_NIBBLES = np.uint16(0x0F0F)
_NIBBLE = np.uint16(4)  # bits


def _q4_0(blocks: Tensor) -> PackedWeight:
    """Convert blocks (out, groups, 18): a float16 scale d, then 32 codes; w = (q - 8) * d."""
    scale = float16_at(blocks, 0)
    return centered(interleave(blocks[..., 2:]), scale, bits=4)


def _q4_1(blocks: Tensor) -> PackedWeight:
    """Convert blocks (out, groups, 20): float16 scale d and minimum m, 32 codes; w = q * d + m."""
    return packed(interleave(blocks[..., 4:]), float16_at(blocks, 0), float16_at(blocks, 2), bits=4)


def _q8_0(blocks: Tensor) -> PackedWeight:
    """Convert blocks (out, groups, 34): a float16 scale d, then 32 signed codes; w = q * d."""
    scale = float16_at(blocks, 0)
    return centered((blocks[..., 2:] ^ 0x80).flatten(1), scale, bits=8)


LOSSLESS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def packed(codes: Tensor, scale: Tensor, offset: Tensor, *, bits: int) -> PackedWeight:
    """Build a weight in groups of 32 with additive offsets."""
    return PackedWeight(
        codes=codes,
        scale=scale,
        offset=offset,
        offset_kind=OffsetKind.ADDITIVE,
        bits=bits,
        group_size=GROUP_SIZE,
    )


def centered(codes: Tensor, scale: Tensor, *, bits: int) -> PackedWeight:
    """Build a weight whose middle code is 0: 8 of 4 bits, 128 of 8."""
    return packed(codes, scale, scale * -(1 << (bits - 1)), bits=bits)


def float16_at(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 value at a byte offset of every block: (out, groups)."""
    halves = blocks.numpy().view(np.float16)[..., start // 2]  # blocks have even sizes
    return arrays.like(blocks, np.ascontiguousarray(halves))  # type: ignore[no-any-return]


def interleave(halves: Tensor) -> Tensor:
    """Reorder nibbles: (out, groups, group / 2) uint8 -> (out, in_features / 2) uint8.

    GGUF puts element i of a group of 32 into the low nibble of byte i and element i + 16 into its
    high nibble; the packed form puts neighbours into one byte. Groups of 16 are alike. NumPy does
    it two bytes at a time and on the caller's thread.
    """
    pairs = np.ascontiguousarray(halves.numpy()).view("<u2")  # (out, groups, group / 4)
    codes = np.empty((*pairs.shape[:-1], 2, pairs.shape[-1]), dtype=np.uint8)
    codes[..., 0, :] = _neighbours(pairs & _LOW_NIBBLES)  # the first half of a group
    codes[..., 1, :] = _neighbours((pairs >> _NIBBLE) & _LOW_NIBBLES)  # the second
    return arrays.like(halves, codes.reshape(len(pairs), -1))  # type: ignore[no-any-return]


def _neighbours(nibbles: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Bring the nibbles of two bytes into the lower one; a cast drops the upper one."""
    nibbles |= nibbles >> _NIBBLE
    return nibbles
