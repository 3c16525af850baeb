"""Converts between plain integer codes and stored orders, and between a scale per group and more.

Plain codes are unsigned, one per uint8. All functions are exact and know no files. Words are
little-endian, as in safetensors files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import QuantizeError
from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

# From here on, float16 holds every bfloat16 exactly. Below, its steps are 2 ** -24, too small to
# change a weight of such a group.
SMALLEST_EXACT = 2.0**-17
WORD_BITS = 32


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack plain codes in the order of `PackedWeight.codes`.

    Args:
        codes: (rows, columns) uint8 below 2 ** bits.
        bits: 4 or 8; 4 needs an even number of columns.

    Returns:
        (rows, columns * bits / 8) uint8, low nibble first.
    """
    if bits == 8:
        return codes.contiguous()
    assert codes.shape[1] % 2 == 0, codes.shape
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Reverse `pack_codes`: (rows, bytes) uint8 -> (rows, bytes * 8 / bits) uint8."""
    if bits == 8:
        return packed
    return arrays.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)  # type: ignore[no-any-return]


def pack_threes(codes: Tensor) -> Tensor:
    """Pack 3-bit codes end to end, lowest first; a code may span two bytes.

    Args:
        codes: (rows, columns) uint8 below 8; columns are padded with 0 to a multiple of 8.

    Returns:
        (rows, 3 * ceil(columns / 8)) uint8.
    """
    padded = arrays.padded(codes, -codes.shape[1] % 8)
    eights = padded.reshape(codes.shape[0], -1, 8).int()
    shifts = arrays.like(codes, np.arange(0, 24, 3, dtype=np.int32))
    words = (eights << shifts).sum(-1).int()  # 24 bits of each are used
    triples: Tensor = arrays.viewed(words.unsqueeze(-1), "uint8")[..., :3].flatten(1)
    return triples


def unpack_stream(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes that lie end to end, lowest bits first; a code may span two bytes.

    Args:
        packed: (rows, bytes) uint8.
        bits: 2 to 8.

    Returns:
        (rows, 8 * ceil(bytes / bits)) uint8; the last are 0 where the bytes have ended.
    """
    if bits in (4, 8):
        return unpack_codes(packed, bits)
    padded = arrays.padded(packed, -packed.shape[1] % bits)
    eights = padded.contiguous().view(packed.shape[0], -1, bits)  # eight codes in as many bytes
    codes = []
    for first in range(0, 8 * bits, bits):
        byte, shift = divmod(first, 8)
        code = eights[..., byte] >> shift
        if shift + bits > 8:
            code = code | eights[..., byte + 1] << (8 - shift)
        codes.append(code & ((1 << bits) - 1))
    return arrays.stack(codes, dim=-1).flatten(1)  # type: ignore[no-any-return]


def bytes_to_words(packed: Tensor) -> Tensor:
    """View rows of bytes as 32-bit words, lowest byte first.

    This is the order of compressed-tensors' `weight_packed`. Zeros fill a row's last word.

    Args:
        packed: (rows, bytes) uint8.

    Returns:
        (rows, ceil(bytes / 4)) int32.
    """
    padded = arrays.padded(packed, -packed.shape[1] % 4)
    words: Tensor = arrays.viewed(padded.flatten(), "int32").view(packed.shape[0], -1)
    return words


def words_to_bytes(words: Tensor, num_bytes: int) -> Tensor:
    """Reverse `bytes_to_words`: (rows, words) int32 -> (rows, num_bytes) uint8."""
    assert arrays.dtype_name(words.dtype) == "int32", words.dtype
    rows = arrays.viewed(words.flatten(), "uint8").view(words.shape[0], -1)
    return rows[:, :num_bytes].contiguous()  # type: ignore[no-any-return]


def pack_zero_points(zero_points: Tensor, bits: int) -> Tensor:
    """Pack zero points along the outputs, as compressed-tensors does.

    Args:
        zero_points: (out_features, groups) uint8 below 2 ** bits.
        bits: 3, 4 or 8.

    Returns:
        (ceil(out_features * bits / 32), groups) int32.
    """
    columns = zero_points.T  # (groups, out_features)
    if bits == 3:
        packed = pack_threes(columns)[:, : -(-columns.shape[1] * 3 // 8)]
    else:
        padded = arrays.padded(columns, -columns.shape[1] % (WORD_BITS // bits))
        packed = pack_codes(padded, bits)
    return bytes_to_words(packed).T.contiguous()


def unpack_zero_points(words: Tensor, bits: int, out_features: int) -> Tensor:
    """Reverse `pack_zero_points`: -> (out_features, groups) uint8."""
    columns = words.T.contiguous()  # (groups, words)
    codes = unpack_stream(words_to_bytes(columns, columns.shape[1] * 4), bits)
    return codes[:, :out_features].T.contiguous()


def exact_enough(name: str, scale: Tensor) -> Tensor:
    """Convert scales to float16, exact from 2 ** -17 on, or raise QuantizeError.

    Below, the error is at most 2 ** -25.
    """
    half = scale.half()
    exact = half.to(scale.dtype) == scale
    if not bool((exact | (scale.abs() < SMALLEST_EXACT)).all()):
        raise QuantizeError(
            f"{name} has a scale of {float(scale[~exact].abs().max()):g}, which float16 does not"
            " hold; use --format compressed-tensors"
        )
    return half


def scales_in_groups(values: Tensor, group_size: int, wanted: int) -> Tensor:
    """Repeat per-group values for smaller groups.

    Args:
        values: (out_features, groups).
        wanted: inputs per smaller group; divides `group_size`.
    """
    assert group_size % wanted == 0, (group_size, wanted)
    return arrays.repeated(values, group_size // wanted, 1)  # type: ignore[no-any-return]


def zero_points_of(weight: PackedWeight) -> Tensor | None:
    """Return zero points as (out_features, groups) uint8; None if an offset is no code."""
    found = weight.offset.float()
    if weight.offset_kind is OffsetKind.ADDITIVE:
        # Any zero point fits a group of zeros; take that of symmetric weights.
        found = (-found / weight.scale.float()).nan_to_num(1 << (weight.bits - 1)).round()
        if not arrays.equal(weight.offset, (-found * weight.scale.float()).to(weight.offset.dtype)):
            return None
    is_code = (found == found.round()) & (found >= 0) & (found < 1 << weight.bits)
    return arrays.cast(found, "uint8") if bool(is_code.all()) else None


def integer_zero_points(weight: PackedWeight) -> Tensor:
    """Return the zero points of a weight that has some, (out_features, groups) uint8."""
    found = zero_points_of(weight)
    assert found is not None, "no zero points, but offsets"
    return found
