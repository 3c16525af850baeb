"""Weights of 4-bit floats of any form."""

from __future__ import annotations

import torch

from appliance.kernels.arrays import dtype_name
from appliance.kernels.weights.fp4 import GROUPS, Fp4Weight


def random_fp4(out_features: int, in_features: int, form: torch.dtype) -> Fp4Weight:
    """All codes, scales of several sizes, and a factor for each row."""
    random = torch.Generator().manual_seed(out_features + in_features)
    codes = torch.randint(0, 256, (out_features, in_features // 2), generator=random)
    shape = (out_features, in_features // GROUPS[dtype_name(form)])
    if form == torch.float8_e8m0fnu:
        bits = torch.randint(120, 131, shape, generator=random)
    else:
        bits = torch.randint(1, 0x7F, shape, generator=random)  # subnormal numbers included
    row_scale = torch.rand(out_features, generator=random) + 0.5
    return Fp4Weight(codes.to(torch.uint8), bits.to(torch.uint8).view(form), row_scale)
