"""Packed weights of any shape, to multiply with."""

from __future__ import annotations

import torch

from appliance.kernels.weights.packed import OffsetKind, PackedWeight


def random_packed(
    out_features: int,
    in_features: int,
    group_size: int,
    *,
    bits: int = 4,
    kind: OffsetKind = OffsetKind.ADDITIVE,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> PackedWeight:
    """Codes that are all in use, scales of both signs."""
    random = torch.Generator().manual_seed(out_features + in_features + group_size + bits)
    levels = 1 << bits
    q = torch.randint(0, levels, (out_features, in_features), generator=random, dtype=torch.uint8)
    shape = (out_features, in_features // group_size)
    scale = (torch.rand(shape, generator=random) + 0.5) / levels
    scale = (scale * (1 - 2 * torch.randint(0, 2, shape, generator=random))).to(dtype)
    center = levels // 2
    if symmetric:
        zero = torch.full(shape, center)
    else:
        zero = torch.randint(center // 2, center + center // 2 + 1, shape, generator=random)
    additive = kind is OffsetKind.ADDITIVE
    offset = (-zero * scale.float() if additive else zero).to(dtype)
    codes = q[:, 0::2] | (q[:, 1::2] << 4) if bits == 4 else q
    return PackedWeight(codes, scale, offset, kind, bits, group_size)
