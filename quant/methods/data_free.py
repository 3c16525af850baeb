"""Quantizes a weight without calibration text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.quant.formats.scheme import Fp8Scheme, SuperBlockScheme
from appliance.quant.methods import fp8, rtn
from appliance.quant.methods.ranges import AROUND, choose_grid, choose_steps
from appliance.quant.run.options import Method

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import LinearScheme, WeightScheme

# Each by its name, so that a method that is only named does not round without a word.
_ROUND_TO_NEAREST = frozenset(
    {
        *(Method.RTN, Method.INT8, Method.AWQ, Method.GPTQ, Method.AWQ_GPTQ),
        *(Method.FP8, Method.SEARCH),  # the ends beside their layers, symmetric weights
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
    if method is Method.SEARCH and not scheme.symmetric:
        return search(weight, scheme, scale_dtype)
    if method not in _ROUND_TO_NEAREST:
        raise NotImplementedError(f"--method {method.value} is named, but nothing quantizes by it")
    return rtn.quantize(weight, scheme, scale_dtype)


def search(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> PackedWeight:
    """Search steps that minimize the sum of the errors' fourth powers in each group.

    The gain is within chance; kept as a tried alternative. Asymmetric 4-bit codes in groups of 64
    leave a mean KL divergence of 0.347 on SmolLM2-135M, plain rounding 0.345
    (`scripts/bench/results/quantize/smollm2.json`); on half of that text, 0.356 and 0.358, with
    standard errors of 0.011. On the same half, least squares weighted with the input energy that
    the weights imply (the norm or the linear before) left 0.352, and 0.345 with inputs scaled by
    its fourth root as in AWQ; powers of 0.7, the objective of half-quadratic optimization, left
    0.94 with integer zero points. The loss follows from how errors add up over correlated inputs,
    which weights do not tell: with text, GPTQ leaves 0.140.
    """
    full = weight.to(torch.float32)
    steps = choose_steps(full, scheme, scale_dtype, shares=AROUND, shifts=(-1, 0, 1), power=4)
    return steps.pack(steps.codes(full))


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
