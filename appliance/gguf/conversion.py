"""Converts GGUF types to the packed form: groups of 32, float16 scales.

It holds some types without loss. Those that no kernel multiplies are widened to codes of 8 bits, at
a loss that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

GROUP_SIZE = 32
LARGEST_CODE = 127
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


def requantize(values: Tensor) -> PackedWeight:
    """Quantize (out_features, in_features) float32 to 8-bit codes in groups of 32.

    Codes are around 128, with 127 steps to each group's largest weight.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    scale = (abs(groups).amax(-1) / LARGEST_CODE).half()
    steps = (1 / (scale.float() + (scale == 0))).unsqueeze(-1)
    codes = (groups * steps).round().clip(-LARGEST_CODE, LARGEST_CODE) + 128
    return centered(arrays.cast(codes.flatten(1), "uint8"), scale, bits=8)


def exact_values(type_name: str, blocks: Tensor) -> Tensor:
    """Dequantize rows of a type that only the `gguf` package reads.

    Args:
        blocks: (out_features, blocks, bytes per block) uint8.

    Returns:
        (out_features, in_features) float32.
    """
    # Imported late: other types do not need it, and it takes a quarter of a second.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(blocks.flatten(1).numpy(), GGMLQuantizationType[type_name])
    return arrays.like(blocks, values)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a conversion, as sums of squares."""

    weights: float = 0.0
    errors: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.weights + other.weights, self.errors + other.errors)

    @property
    def relative(self) -> float:
        """Root mean square of the errors over that of the weights."""
        return float((self.errors / self.weights) ** 0.5) if self.weights else 0.0

    @classmethod
    def between(cls, exact: Tensor, found: Tensor) -> Loss:
        """Compare weights (out_features, in_features) float32."""
        return cls(_energy(exact), _energy(found - exact))


def _energy(values: Tensor) -> float:
    return float((values * values).sum())
