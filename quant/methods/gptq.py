"""GPTQ: rounds columns one by one and corrects later columns for each rounding error.

From Frantar, Ashkboos, Hoefler and Alistarh, https://arxiv.org/abs/2210.17323. Columns go by
falling input energy, while groups and scales stay in place ("static groups"), so nothing is
permuted at run time. Scales and codes are then improved together, but of FP4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.errors import QuantizeError
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, TrellisScheme
from appliance.quant.methods import data_free
from appliance.quant.methods.descent import descend
from appliance.quant.methods.fp4_grids import Fp4Grid
from appliance.quant.methods.ranges import SHRUNK, choose_grid

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.fp4 import Fp4Weight
    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.packed import PackedWeight
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme
    from appliance.quant.run.options import QuantizedWeight

DAMPING = 0.01  # share of the mean diagonal to add to the diagonal
DOUBT = 0.4  # share of the measured correlations attributed to chance
MOST_DAMPING = 10.0
COLUMNS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class GPTQResult:
    """A quantized weight.

    Attributes:
        damping: share of the mean diagonal that was added.
    """

    weight: PackedWeight | GgmlWeight | Fp4Weight
    damping: float


def quantize_linear(
    weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
) -> QuantizedWeight:
    """Quantize a weight; see `Quantizer`."""
    assert not isinstance(scheme, TrellisScheme), "a method of its own"
    if hessian is None or isinstance(scheme, Fp8Scheme):
        return data_free.quantize_linear(weight, None, scheme, dtype)
    return quantize(weight, hessian, scheme, dtype).weight


def quantize(
    weight: Tensor,
    hessian: Tensor,
    scheme: GroupedScheme,
    dtype: torch.dtype = torch.bfloat16,
    *,
    damping: float = DAMPING,
    doubt: float = DOUBT,
    shares: tuple[float, ...] = SHRUNK,
) -> GPTQResult:
    """Quantize one linear weight.

    Args:
        weight: (out_features, in_features), finite.
        hessian: (in_features, in_features) float32, mean of x x^T over calibration tokens.
        scheme: its group size divides in_features.
        dtype: of scales, float16 or bfloat16.
        doubt: share to reduce off-diagonal moments by: few rows estimate many pairs of inputs, and
            corrections by chance do not carry over to other text.
        damping: grows tenfold until the matrix is positive definite.
        shares: shares of a group's range to try; see `choose_steps`.

    Raises:
        QuantizeError: the matrix holds NaN or infinity, or no damping helps.
    """
    original = weight.to(torch.float32)
    energy = hessian.diagonal().clone()
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError("activations hold NaN or infinity")
    believed = hessian * (1 - doubt)
    believed.diagonal().copy_(energy)
    order = torch.argsort(energy, descending=True, stable=True)
    factor, used = inverse_factor(believed[order][:, order], damping)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    if not isinstance(scheme, Fp4Scheme):  # later columns make up for the rest of an error
        energy = factor.diagonal().square().reciprocal()[back]
    steps = choose_grid(original, scheme, dtype, importance=energy, shares=shares)
    group_size = scheme.group_size or weight.shape[1]
    groups = (order // group_size).tolist()
    left = original[:, order].contiguous()
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS_AT_ONCE):
        end = min(start + COLUMNS_AT_ONCE, left.shape[1])
        block, inverse = left[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            column, group = block[:, i : i + 1], groups[start + i]
            code = steps.codes(column, group)
            codes[:, start + i : start + i + 1] = code
            error = (column - steps.weights(code, group)) / inverse[i, i]
            errors[:, i : i + 1] = error
            block[:, i:].addmm_(error, inverse[i : i + 1, i:], alpha=-1)
        left[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    codes = codes[:, back]
    if not isinstance(steps, Fp4Grid):
        steps, codes = descend(original, steps, codes, _damped(believed, used))
    return GPTQResult(steps.pack(codes), used)


def output_loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Return the outputs' squared error over their sum of squares, on calibration tokens."""
    full = weight.to(torch.float32)
    return output_energy(full - quantized, hessian) / max(output_energy(full, hessian), 1e-30)


def output_energy(weight: Tensor, hessian: Tensor) -> float:
    """Return the outputs' mean sum of squares over calibration tokens."""
    return float(((weight @ hessian) * weight).sum())


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return the upper Cholesky factor of the inverse, and the damping used."""
    while damping <= MOST_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(_damped(hessian, damping))
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return upper, damping
        damping = max(damping, 1e-4) * 10
    raise QuantizeError("no damping makes the activations' second moments positive definite")


def _damped(hessian: Tensor, damping: float) -> Tensor:
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean().clamp_min(1e-12))
    return damped
