"""The layouts of GGML's quantized types as they are held and multiplied.

Layouts are those of llama.cpp's ggml-common.h but for IQ1 to IQ3, whose files store 4 or 8 weights
as a place in a grid: they are held with a code of 3 or 4 bits for each weight. Numbers and values
agree with the `gguf` package. Imports nothing of ours but `arrays`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


SUPERBLOCK = 256  # weights in a block of a K type
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _and_negative(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values of codes whose uppermost bit is a sign."""
    return values + tuple(-value for value in values)


# The values of codes of IQ1 to IQ3, as multiples of an eighth of the block's d times an odd number.
# Of IQ1, a code's uppermost bit says whether the grid's -1, 0 or 1 is raised or lowered by 1/8. The
# fourth of four is never stored.
IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)
IQ2_VALUES = _and_negative((8, 25, 43, 0))
IQ3_S_VALUES = _and_negative((8, 24, 40, 56, 72, 88, 104, 120))
IQ3_XXS_VALUES = _and_negative((8, 24, 40, 56, 72, 88, 104, 124))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded rows: w = code * scale + offset.

    Attributes:
        codes: (rows, in_features), uint8 where there are offsets, else int8.
        scale: (rows, groups) float32, exact.
        offset: the same; None without offsets.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None

    def weights(self) -> Tensor:
        """Return code * scale + offset, (rows, in_features) float32, rounded once."""
        groups = self.codes.view(*self.scale.shape, -1).float()
        groups *= self.scale.unsqueeze(-1)
        if self.offset is not None:
            groups += self.offset.unsqueeze(-1)
        return groups.flatten(1)


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type.

    Attributes:
        number: GGML's, as in GGUF files.
        block_size: weights in a block.
        block_bytes: bytes of a block.
        halves: where a block's float16 scales lie.
        middle: the code that stands for 0; 0 where groups have offsets, None if codes name
            values.
        codes: from blocks (rows, blocks, block_bytes) uint8 to codes (rows, in_features) uint8.
        scales: from blocks to the exact scale and offset of each group, (rows, groups) float32.
        values: what codes name where `middle` is None.
    """

    number: int
    block_size: int
    block_bytes: int
    halves: tuple[int, ...]
    middle: int | None
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    values: tuple[int, ...] = IQ4_VALUES

    def decode(self, blocks: Tensor) -> Decoded:
        """Decode blocks (rows, blocks, block_bytes) uint8."""
        codes = self.codes(blocks)
        if self.middle is None:
            table = arrays.like(codes, np.array(self.values, dtype=np.int8))
            codes = table[codes.long()]
        elif self.middle:
            codes = arrays.viewed(codes, "int8") - self.middle
        return Decoded(codes, *self.scales(blocks))


def half_at(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte offset of every block, (rows, blocks)."""
    halves: Tensor = arrays.viewed(blocks[..., start : start + 2].contiguous(), "float16")
    return halves[..., 0]


def bytes_of_q2_k(blocks: Tensor) -> Tensor:
    """Return a scale and, above it, a minimum of 4 bits for each group of 16."""
    return blocks[..., :16]


def integers_of_q3_k(blocks: Tensor) -> Tensor:
    """Return 16 scales of 6 bits, around 32.

    Their low four bits are the nibbles of the first eight bytes, their high two bits the pairs of
    the last four bytes.
    """
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = arrays.cat((low & 0xF, low >> 4), dim=-1)
    high = arrays.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    integers: Tensor = low | high << 4
    return integers


def integers_of_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of 6 bits, of Q5_K, too.

    The first four of each lie in bytes 0 to 3 and 4 to 7 of twelve; of the last four, the low bits
    in bytes 8 to 11 and the high two above the first four.
    """
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = arrays.cat((first & 63, (third & 0xF) | ((first >> 6) << 4)), dim=-1)
    minima = arrays.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales, minima


def integers_of_iq4_xs(blocks: Tensor) -> Tensor:
    """Return 8 scales of 6 bits, around 32: pairs of high bits, then nibbles."""
    high = arrays.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    low = arrays.stack((blocks[..., 4:8] & 0xF, blocks[..., 4:8] >> 4), dim=-1)
    integers: Tensor = low.flatten(-2) | high.flatten(-2) << 4
    return integers


def odd_integers(blocks: Tensor, groups: int) -> Tensor:
    """Return an integer of 4 bits for each group, whose scale is (2 * integer + 1) * d / 8.

    They are the nibbles of the bytes after d, the lower one first.
    """
    octets = blocks[..., 2 : 2 + groups // 2]
    nibbles: Tensor = arrays.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)
    return nibbles


def _scales_of_q2_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    integers = bytes_of_q2_k(blocks)
    scale = half_at(blocks, 80).float().unsqueeze(-1) * (integers & 0xF)
    offset = -half_at(blocks, 82).float().unsqueeze(-1) * (integers >> 4)
    return scale.flatten(1), offset.flatten(1)


def _scales_of_q3_k(blocks: Tensor) -> tuple[Tensor, None]:
    return _around_32(integers_of_q3_k(blocks), half_at(blocks, 108))


def _scales_of_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = integers_of_q4_k(blocks)
    d, dmin = half_at(blocks, 0).float(), half_at(blocks, 2).float()
    return (d.unsqueeze(-1) * scales).flatten(1), (-dmin.unsqueeze(-1) * minima).flatten(1)


def _scales_of_q6_k(blocks: Tensor) -> tuple[Tensor, None]:
    integers = arrays.viewed(blocks[..., 192:208].contiguous(), "int8").float()
    return (integers * half_at(blocks, 208).float().unsqueeze(-1)).flatten(1), None


def _scales_of_iq4_xs(blocks: Tensor) -> tuple[Tensor, None]:
    return _around_32(integers_of_iq4_xs(blocks), half_at(blocks, 0))


def _odd_scales(blocks: Tensor, groups: int) -> tuple[Tensor, None]:
    odd = 2 * odd_integers(blocks, groups).float() + 1
    return (half_at(blocks, 0).float().unsqueeze(-1) * 0.125 * odd).flatten(1), None


def _one_half(blocks: Tensor) -> tuple[Tensor, None]:
    return half_at(blocks, 0).float(), None


def _two_halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return half_at(blocks, 0).float(), half_at(blocks, 2).float()


def _around_32(integers: Tensor, d: Tensor) -> tuple[Tensor, None]:
    scale = (arrays.viewed(integers, "int8") - 32).float() * d.float().unsqueeze(-1)
    return scale.flatten(1), None


def _codes_of_q3_k(blocks: Tensor) -> Tensor:
    codes: Tensor = (_pairs(blocks[..., 32:96]) | _bits(blocks[..., :32]) << 2).flatten(1)
    return codes


def _codes_of_q5_k(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48]) << 4).flatten(1)


def _codes_of_q6_k(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., :128], 64) | (_pairs(blocks[..., 128:192]) << 4).flatten(1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Split bytes into nibbles, (rows, weights): of each run the low ones, then the high ones."""
    runs = packed.unflatten(-1, (-1, run))
    nibbles: Tensor = arrays.stack((runs & 0xF, runs >> 4), dim=-2).flatten(1)
    return nibbles


def _pairs(packed: Tensor) -> Tensor:
    """Split 64 bytes into bit pairs, the lowest of each 32 bytes first: (rows, blocks, 256)."""
    halves = packed.unflatten(-1, (2, 1, 32))
    shifts = arrays.like(packed, np.arange(0, 8, 2, dtype=np.uint8)).view(4, 1)
    pairs: Tensor = (halves >> shifts) & 3
    return pairs.flatten(2)


def _bits(packed: Tensor) -> Tensor:
    """Split 32 bytes into bits, the lowest first: (rows, blocks, 256)."""
    shifts = arrays.like(packed, np.arange(8, dtype=np.uint8)).view(8, 1)
    bits: Tensor = (packed.unsqueeze(-2) >> shifts) & 1
    return bits.flatten(2)


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """Decode 32 fifth bits in four bytes and 32 nibbles after them: (rows, weights)."""
    shifts = arrays.like(blocks, np.arange(8, dtype=np.uint8))
    high = (blocks[..., start : start + 4].unsqueeze(-1) >> shifts) & 1  # (rows, blocks, 4, 8)
    codes: Tensor = _nibbles(blocks[..., start + 4 :], 16) | (high.flatten(1) << 4)
    return codes


def _three_bits(number: int, groups: int, values: tuple[int, ...]) -> GgmlType:
    """Return a type of a d, integers of 4 bits for each group, third bits and pairs of bits."""
    bits = 2 + groups // 2

    def codes(blocks: Tensor) -> Tensor:
        pairs, upper = _pairs(blocks[..., bits + 32 :]), _bits(blocks[..., bits : bits + 32])
        found: Tensor = (pairs | upper << 2).flatten(1)
        return found

    return _of_odd_scales(number, groups, bits + 96, codes, values)


def _four_bits(number: int, values: tuple[int, ...]) -> GgmlType:
    """Return a type of a d, integers of 4 bits for groups of 32, and nibbles."""
    return _of_odd_scales(number, 8, 134, lambda blocks: _nibbles(blocks[..., 6:], 16), values)


def _of_odd_scales(
    number: int,
    groups: int,
    block_bytes: int,
    codes: Callable[[Tensor], Tensor],
    values: tuple[int, ...],
) -> GgmlType:
    return GgmlType(
        number,
        SUPERBLOCK,
        block_bytes,
        (0,),
        None,
        codes,
        lambda blocks: _odd_scales(blocks, groups),
        values,
    )


# By type: halves d (and dmin or a minimum m), integer scales (and minima), planes of codes.
GGML_TYPES: dict[str, GgmlType] = {
    # d, 32 fifth bits, 32 nibbles
    "Q5_0": GgmlType(6, 32, 22, (0,), 16, lambda blocks: _five_bits(blocks, 2), _one_half),
    # d, m, 32 fifth bits, 32 nibbles
    "Q5_1": GgmlType(7, 32, 24, (0, 2), 0, lambda blocks: _five_bits(blocks, 4), _two_halves),
    # 16 bytes of scales and minima of 4 bits, 64 of bit pairs, d, dmin; groups of 16
    "Q2_K": GgmlType(
        10,
        SUPERBLOCK,
        84,
        (80, 82),
        0,
        lambda blocks: _pairs(blocks[..., 16:80]).flatten(1),
        _scales_of_q2_k,
    ),
    # 32 bytes of third bits, 64 of bit pairs, 12 of scales of 6 bits, d; groups of 16
    "Q3_K": GgmlType(11, SUPERBLOCK, 110, (108,), 4, _codes_of_q3_k, _scales_of_q3_k),
    # d, dmin, 12 bytes of scales and minima of 6 bits, 256 nibbles; groups of 32
    "Q4_K": GgmlType(
        12,
        SUPERBLOCK,
        144,
        (0, 2),
        0,
        lambda blocks: _nibbles(blocks[..., 16:], 32),
        _scales_of_q4_k,
    ),
    # As Q4_K, with 256 fifth bits before the nibbles
    "Q5_K": GgmlType(13, SUPERBLOCK, 176, (0, 2), 0, _codes_of_q5_k, _scales_of_q4_k),
    # 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d; groups of 16
    "Q6_K": GgmlType(14, SUPERBLOCK, 210, (208,), 32, _codes_of_q6_k, _scales_of_q6_k),
    # d and 32 nibbles, indices of a table
    "IQ4_NL": GgmlType(
        20, 32, 18, (0,), None, lambda blocks: _nibbles(blocks[..., 2:], 16), _one_half
    ),
    # d, 8 pairs of high bits and 8 nibbles of scales, 256 nibbles that index a table
    "IQ4_XS": GgmlType(
        23,
        SUPERBLOCK,
        136,
        (0,),
        None,
        lambda blocks: _nibbles(blocks[..., 8:], 16),
        _scales_of_iq4_xs,
    ),
    # Of files' grids, see `appliance.gguf.grids`; 16 groups, or 8
    "IQ1_S": _three_bits(19, 8, IQ1_VALUES),
    "IQ1_M": _three_bits(29, 16, IQ1_VALUES),
    "IQ2_XXS": _three_bits(16, 8, IQ2_VALUES),
    "IQ2_XS": _three_bits(17, 16, IQ2_VALUES),
    "IQ2_S": _three_bits(22, 16, IQ2_VALUES),
    "IQ3_XXS": _four_bits(18, IQ3_XXS_VALUES),
    "IQ3_S": _four_bits(21, IQ3_S_VALUES),
}
