"""Pairs of pack and unpack between plain integer codes and the orders they are stored in.

Plain codes are unsigned, one per uint8. All functions are exact and know neither scales nor
files. Words are little-endian, as safetensors files are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD_BITS = 32


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bring plain codes into the order of `PackedWeight.codes`.

    Args:
        codes: (rows, columns) uint8 below 2 ** bits.
        bits: 4 or 8; with 4, columns must be even.

    Returns:
        (rows, columns * bits / 8) uint8, low nibble first.
    """
    if bits == 8:
        return codes.contiguous()
    assert codes.shape[1] % 2 == 0, codes.shape
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`: (rows, bytes) uint8 -> (rows, bytes * 8 / bits) uint8."""
    if bits == 8:
        return packed
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def bytes_to_words(packed: Tensor) -> Tensor:
    """View rows of bytes as 32-bit words, lowest byte first.

    This is compressed-tensors' order of `weight_packed`, so packing a `PackedWeight` for disk
    moves no bits; only a row whose bytes do not fill its last word is padded with zeros.

    Args:
        packed: (rows, bytes) uint8.

    Returns:
        (rows, ceil(bytes / 4)) int32.
    """
    padded = pad(packed, (0, -packed.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(packed.shape[0], -1)


def words_to_bytes(words: Tensor, num_bytes: int) -> Tensor:
    """Undo `bytes_to_words`: (rows, words) int32 -> (rows, num_bytes) uint8."""
    assert words.dtype == torch.int32, words.dtype
    return words.flatten().view(torch.uint8).view(words.shape[0], -1)[:, :num_bytes].contiguous()


def pack_zero_points(zero_points: Tensor, bits: int) -> Tensor:
    """Bring zero points into compressed-tensors' order, which packs along the outputs.

    Args:
        zero_points: (out_features, groups) uint8 below 2 ** bits.
        bits: 4 or 8.

    Returns:
        (ceil(out_features * bits / 32), groups) int32.
    """
    codes_per_word = WORD_BITS // bits
    columns = pad(zero_points.T, (0, -zero_points.shape[0] % codes_per_word))  # (groups, out)
    return bytes_to_words(pack_codes(columns, bits)).T.contiguous()


def unpack_zero_points(words: Tensor, bits: int, out_features: int) -> Tensor:
    """Undo `pack_zero_points`: -> (out_features, groups) uint8."""
    columns = words.T.contiguous()  # (groups, words)
    codes = unpack_codes(words_to_bytes(columns, columns.shape[1] * 4), bits)
    return codes[:, :out_features].T.contiguous()
