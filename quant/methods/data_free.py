"""Quantizes a weight without calibration text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, TrellisScheme
from appliance.quant.methods import fp8, rtn
from appliance.quant.methods.fp4_grids import choose_floats
from appliance.quant.methods.ranges import AROUND, choose_grid

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.options import Method, QuantizedWeight


def quantize(
    weight: Tensor, scheme: LinearScheme, method: Method, scale_dtype: torch.dtype
) -> QuantizedWeight:
    """Quantize rows of a weight; for blockwise FP8, rows begin at a multiple of 128.

    Args:
        weight: (out_features, in_features), finite.
        method: methods that need text round to nearest here, for weights without inputs from text.
        scale_dtype: type of stored integer scales.

    Raises:
        NotImplementedError: no function of this folder belongs to the method.
    """
    return method.quantizer(weight, None, scheme, scale_dtype)


def quantize_linear(
    weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
) -> QuantizedWeight:
    """Round a weight to the nearest that its scheme can hold; see `Quantizer`."""
    if isinstance(scheme, Fp8Scheme):
        return fp8.quantize(weight, scheme)
    if isinstance(scheme, BlockScheme):
        full = weight.to(torch.float32)
        grid = choose_grid(full, scheme, dtype, shares=AROUND)
        return grid.pack(grid.codes(full))
    if isinstance(scheme, Fp4Scheme):
        full = weight.to(torch.float32)
        floats = choose_floats(full, scheme)
        return floats.pack(floats.codes(full))
    assert not isinstance(scheme, TrellisScheme), "a method of its own"
    return rtn.quantize(weight, scheme, dtype)


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate rows that were quantized separately."""
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    if floats:
        return Fp8Weight.concatenate(floats)
    coded = [part for part in parts if isinstance(part, TrellisWeight)]
    if coded:
        return TrellisWeight.concatenate(coded)
    halves = [part for part in parts if isinstance(part, Fp4Weight)]
    if halves:
        return Fp4Weight.concatenate(halves)
    blocks = [part for part in parts if isinstance(part, GgmlWeight)]
    if blocks:
        return GgmlWeight.concatenate(blocks)
    return PackedWeight.concatenate([part for part in parts if isinstance(part, PackedWeight)])
