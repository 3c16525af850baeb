"""The K types of GGUF: blocks of 256 weights with quantized scales.

Layouts are those of llama.cpp's block_q4_K, block_q5_K and block_q6_K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.gguf.lossless import float16_at, packed

if TYPE_CHECKING:
    from appliance.kernels.packed import PackedWeight

GROUPS = 8  # of 32 weights in a block


def q4_k(blocks: Tensor) -> PackedWeight:
    """Convert blocks (out, blocks, 144): d, dmin, 6-bit scales and minima, 256 nibbles; exact.

    w = q * (d * scale) - dmin * minimum, in groups of 32; the products take float32.
    """
    low, high = _nibbles(blocks[..., 16:])
    codes = torch.stack((low, high), dim=-2)  # (out, blocks, 4, 2, 32): groups in order
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed(pairs.flatten(1), *_scales_and_offsets(blocks), bits=4)


def q5_k(blocks: Tensor) -> PackedWeight:
    """Convert blocks (out, blocks, 176): as Q4_K, with 256 fifth bits before the nibbles; exact."""
    low, high = _nibbles(blocks[..., 48:])
    fifth = blocks[..., None, 16:48]  # (out, blocks, 1, 32): bit g is that of group g
    shifts = torch.arange(GROUPS, dtype=torch.uint8).view(4, 2, 1)
    codes = torch.stack((low, high), dim=-2)  # (out, blocks, 4, 2, 32)
    codes |= ((fifth.unsqueeze(-2) >> shifts) & 1) << 4
    return packed(codes.flatten(1), *_scales_and_offsets(blocks), bits=8)


def q6_k_values(blocks: Tensor) -> Tensor:
    """Dequantize blocks (out, blocks, 210) to weights (out, in_features) float32.

    128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, each of 16 weights, and a
    float16 d; w = d * scale * (q - 32). Each half of a block is four runs of 32.
    """
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves, first and second 32
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat((low & 0xF, low >> 4), dim=-2)  # (out, blocks, 2, 4 runs, 32)
    pairs = (high >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)) & 3
    codes = (nibbles | (pairs << 4)).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales *= float16_at(blocks, 208).float().unsqueeze(-1)  # (out, blocks, 16)
    values = codes.flatten(2).unflatten(-1, (16, 16)) * scales.unsqueeze(-1)
    return torch.flatten(values, 1)


def _nibbles(packed_pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Split (out, blocks, 128) into low and high nibbles, each (out, blocks, 4, 32)."""
    runs = packed_pairs.unflatten(-1, (4, 32))
    return runs & 0xF, runs >> 4


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decode scales and offsets of Q4_K's and Q5_K's groups: (out, groups) float32, exact.

    Twelve bytes hold 8 scales and 8 minima of 6 bits. The first four of each lie in bytes 0 to 3
    and 4 to 7; of the last four, the low bits in bytes 8 to 11 and the high two above the first
    four.
    """
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 0xF) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    d, dmin = float16_at(blocks, 0).float(), float16_at(blocks, 2).float()
    scale = d.unsqueeze(-1) * scales
    offset = -dmin.unsqueeze(-1) * minima
    return scale.flatten(1), offset.flatten(1)
