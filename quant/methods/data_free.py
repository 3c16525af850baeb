"""Quantizes a weight without calibration text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.quant.formats.scheme import Fp8Scheme, SuperBlockScheme
from appliance.quant.methods import fp8, rtn
from appliance.quant.methods.ranges import AROUND, choose_grid
from appliance.quant.run.options import Method

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import LinearScheme

# Each by its name, so that a method that is only named does not round without a word.
_ROUND_TO_NEAREST = frozenset(
    {
        *(Method.RTN, Method.INT8, Method.AWQ, Method.GPTQ, Method.AWQ_GPTQ),
        Method.FP8,  # the ends beside their layers
    }
)


def quantize(
    weight: Tensor, scheme: LinearScheme, method: Method, scale_dtype: torch.dtype
) -> PackedWeight | Fp8Weight | GgmlWeight:
    """Quantize rows of a weight; for blockwise FP8, rows begin at a multiple of 128.

    Args:
        weight: (out_features, in_features), finite.
        method: methods that need text round to nearest here, for weights without inputs from text.
        scale_dtype: type of stored integer scales.

    Raises:
        NotImplementedError: no function of this folder belongs to the method.
    """
    if isinstance(scheme, Fp8Scheme):
        return fp8.quantize(weight, scheme)
    if isinstance(scheme, SuperBlockScheme):
        full = weight.to(torch.float32)
        grid = choose_grid(full, scheme, scale_dtype, shares=AROUND)
        return grid.pack(grid.codes(full))
    if method not in _ROUND_TO_NEAREST:
        raise NotImplementedError(f"--method {method.value} is named, but nothing quantizes by it")
    return rtn.quantize(weight, scheme, scale_dtype)


def concatenate(
    parts: list[PackedWeight | Fp8Weight | GgmlWeight],
) -> PackedWeight | Fp8Weight | GgmlWeight:
    """Concatenate rows that were quantized separately."""
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    if floats:
        return Fp8Weight.concatenate(floats)
    blocks = [part for part in parts if isinstance(part, GgmlWeight)]
    if blocks:
        return GgmlWeight.concatenate(blocks)
    return PackedWeight.concatenate([part for part in parts if isinstance(part, PackedWeight)])
