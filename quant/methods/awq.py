"""AWQ: large inputs are given finer steps, by scales that whatever made the inputs undoes.

From Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, https://arxiv.org/abs/2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.quant.methods.ranges import WHOLE, choose_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme

EXPONENTS = tuple(step / 20 for step in range(20))
LARGEST_SCALE = 1e4  # of an input, and its inverse the smallest: far from float16's limits


@dataclass(frozen=True, slots=True)
class InputScales:
    """What a linear's inputs are divided by, and its columns multiplied with.

    Attributes:
        scales: (in_features,) float32, positive.
        exponent: of the activations' magnitude; 0 leaves everything as it was.
        loss: of the outputs, as a share of what it is with exponent 0.
    """

    scales: Tensor
    exponent: float
    loss: float


def choose_scales(
    weights: Sequence[Tensor],
    hessian: Tensor,
    magnitude: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sources: int | None = None,
    head_dim: int = 1,
    shares: tuple[float, ...] = WHOLE,
) -> InputScales:
    """Search the exponent that loses least at the outputs of all weights together.

    Args:
        weights: of linears that share their input, (out_features, in_features) float32 each.
        hessian: (in_features, in_features) float32, the mean of x x^T over calibration tokens.
        magnitude: (in_features,) float32, the mean of |x|.
        scheme: how they will be quantized.
        dtype: in which group scales will be stored.
        sources: heads that feed the inputs, each as many neighbouring heads as any other, which
            have to share their scales: KV heads. None: every input has a source of its own.
        head_dim: inputs of a head.
        shares: of a group's range that are tried; see `choose_steps`.
    """
    whole = torch.cat(list(weights))
    mean = magnitude if sources is None else _shared(magnitude, sources, head_dim)
    base = None
    best = InputScales(torch.ones_like(magnitude), 0.0, 1.0)
    for exponent in EXPONENTS:
        scales = mean.clamp_min(1e-6).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        scales = scales.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
        loss = _loss(whole, hessian, scales, scheme, dtype, shares)
        if base is None:
            base = max(loss, 1e-30)
        if loss / base < best.loss:
            best = InputScales(scales, exponent, loss / base)
    return best


def _shared(magnitude: Tensor, sources: int, head_dim: int) -> Tensor:
    """The mean over heads of one source, repeated for each of them: (in_features,)."""
    heads = magnitude.view(sources, -1, head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def _loss(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    shares: tuple[float, ...],
) -> float:
    scaled = weight * scales
    energy = hessian.diagonal() / scales.square()
    steps = choose_steps(scaled, scheme, dtype, importance=energy, shares=shares)
    lost = steps.weights(steps.codes(scaled)) / scales - weight
    return float(((lost @ hessian) * lost).sum())
