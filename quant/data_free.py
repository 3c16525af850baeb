"""Quantizes a weight by itself, with no text: what method and scheme ask for, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.packed import PackedWeight
from appliance.quant import fp8, rtn
from appliance.quant.scheme import Fp8Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.quant.options import Method
    from appliance.quant.scheme import LinearScheme


def quantize(
    weight: Tensor, scheme: LinearScheme, method: Method, scale_dtype: torch.dtype
) -> PackedWeight | Fp8Weight:
    """Quantize rows of a weight; with blocks of FP8, from a multiple of 128 on.

    Args:
        weight: (out_features, in_features), finite.
        scheme: what it should become.
        method: one that needs text stands for plain rounding here: of what no text reaches.
        scale_dtype: in which scales of integers are stored.
    """
    if isinstance(scheme, Fp8Scheme):
        return fp8.quantize(weight, scheme)
    return rtn.quantize(weight, scheme, scale_dtype)


def concatenate(parts: list[PackedWeight | Fp8Weight]) -> PackedWeight | Fp8Weight:
    """Put rows that were quantized apart together again."""
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    if floats:
        return Fp8Weight.concatenate(floats)
    return PackedWeight.concatenate([part for part in parts if isinstance(part, PackedWeight)])
