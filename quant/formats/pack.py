"""Converts between plain integer codes and the packed orders that are stored.

Plain codes are unsigned, one per uint8. All functions are exact and know neither scales nor files.
Words are little-endian, as in safetensors files.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD_BITS = 32


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack plain codes in the order of `PackedWeight.codes`.

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
    """Reverse `pack_codes`: (rows, bytes) uint8 -> (rows, bytes * 8 / bits) uint8."""
    if bits == 8:
        return packed
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def pack_threes(codes: Tensor) -> Tensor:
    """Pack codes of 3 bits end to end, lowest first; a code may span two bytes.

    Args:
        codes: (rows, columns) uint8 below 8; columns are padded with 0 to a multiple of 8.

    Returns:
        (rows, 3 * ceil(columns / 8)) uint8.
    """
    eights = pad(codes, (0, -codes.shape[1] % 8)).reshape(codes.shape[0], -1, 8).to(torch.int32)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=codes.device)
    words = (eights << shifts).sum(-1, dtype=torch.int32)  # 24 bits of each are used
    return words.unsqueeze(-1).view(torch.uint8)[..., :3].flatten(1)


def unpack_threes(packed: Tensor) -> Tensor:
    """Reverse `pack_threes`: (rows, 3 * eights) uint8 -> (rows, 8 * eights) uint8."""
    triples = pad(packed.view(packed.shape[0], -1, 3), (0, 1)).contiguous()
    words = triples.view(torch.int32)  # (rows, eights, 1)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=packed.device)
    return (words >> shifts & 7).to(torch.uint8).flatten(1)


def bytes_to_words(packed: Tensor) -> Tensor:
    """View rows of bytes as 32-bit words, lowest byte first.

    This is the order of compressed-tensors' `weight_packed`, so writing a `PackedWeight` moves no
    bits; a row that does not fill its last word is padded with zeros.

    Args:
        packed: (rows, bytes) uint8.

    Returns:
        (rows, ceil(bytes / 4)) int32.
    """
    padded = pad(packed, (0, -packed.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(packed.shape[0], -1)


def words_to_bytes(words: Tensor, num_bytes: int) -> Tensor:
    """Reverse `bytes_to_words`: (rows, words) int32 -> (rows, num_bytes) uint8."""
    assert words.dtype == torch.int32, words.dtype
    return words.flatten().view(torch.uint8).view(words.shape[0], -1)[:, :num_bytes].contiguous()


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
        packed = pack_codes(pad(columns, (0, -columns.shape[1] % (WORD_BITS // bits))), bits)
    return bytes_to_words(packed).T.contiguous()


def unpack_zero_points(words: Tensor, bits: int, out_features: int) -> Tensor:
    """Reverse `pack_zero_points`: -> (out_features, groups) uint8."""
    columns = words.T.contiguous()  # (groups, words)
    if bits == 3:  # three words hold 32 codes
        columns = pad(columns, (0, -columns.shape[1] % 3))
    packed = words_to_bytes(columns, columns.shape[1] * 4)
    codes = unpack_threes(packed) if bits == 3 else unpack_codes(packed, bits)
    return codes[:, :out_features].T.contiguous()
