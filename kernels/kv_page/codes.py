"""Quantizes rows of keys and values to the codes of a page, by definition and exact to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-24  # the smallest float16: no token has a scale of 0
FLOAT16_MAX = 65504.0
INT4_CENTRE = 8  # the code whose value is the offset


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Return E4M3 codes of x / scale, saturated, as uint8."""
    scaled = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with one scale per row: codes + 128 (..., head_dim) uint8, scales (...,) float16.

    Codes are computed from the stored scale. A row too small for a float16 scale has codes 0.
    """
    x = x.float()
    scales = (x.abs().amax(dim=-1) / 127).clamp(max=FLOAT16_MAX).half()
    divisor = scales.float().unsqueeze(-1)
    codes = (x / divisor).round().clamp(-127, 127)
    codes = torch.where(divisor == 0, 0.0, codes) + 128
    return codes.to(torch.uint8), scales.clamp(min=SMALLEST_SCALE)


def quantize_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with one scale and offset per row: x is about (code - 8) * scale + offset.

    Codes are computed from the stored, rounded scale and offset.
    """
    x = x.float()
    lowest, highest = x.amin(dim=-1), x.amax(dim=-1)
    scales = ((highest - lowest) / 15).clamp(SMALLEST_SCALE, FLOAT16_MAX).half()
    offsets = (lowest + INT4_CENTRE * scales.float()).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    centred = (x - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    codes = (centred.round() + INT4_CENTRE).clamp(0, 15)
    return codes.to(torch.uint8), scales, offsets


def hadamard_size(head_dim: int) -> int:
    """Return the elements of a head that are transformed together: a power of two."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Return the normalized Walsh-Hadamard transform of each part: (..., head_dim) float32.

    It spreads outliers over a head; q . k stays the same if both are transformed.
    """
    size = hadamard_size(x.shape[-1])
    out = x.float()
    stride = 1
    while stride < size:
        pairs = out.unflatten(-1, (-1, 2, stride))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    normalized: Tensor = out * float(size) ** -0.5
    return normalized
