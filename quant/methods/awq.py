"""AWQ: scales give large inputs finer steps; the layer before divides them out.

From Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, https://arxiv.org/abs/2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.quant.methods.ranges import WHOLE, choose_grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.quant.formats.scheme import GroupedScheme

EXPONENTS = tuple(step / 20 for step in range(20))
LARGEST_SCALE = 1e4  # its inverse is the smallest; both are far from float16's limits


@dataclass(frozen=True, slots=True)
class InputScales:
    """Scales that divide a linear's inputs and multiply its columns.

    Attributes:
        scales: (in_features,) float32, positive.
        exponent: of the activations' magnitude; 0 changes nothing.
        loss: loss of the outputs relative to that of exponent 0.
    """

    scales: Tensor
    exponent: float
    loss: float


def choose_scales(
    weights: Sequence[Tensor],
    hessian: Tensor,
    magnitude: Tensor,
    scheme: GroupedScheme,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sources: int | None = None,
    head_dim: int = 1,
    shares: tuple[float, ...] = WHOLE,
) -> InputScales:
    """Search the exponent with the least output loss over all weights.

    Args:
        weights: linears that share their input, (out_features, in_features) float32 each.
        hessian: (in_features, in_features) float32, mean of x x^T over calibration tokens.
        magnitude: (in_features,) float32, mean of |x|.
        scheme: the scheme to quantize them with.
        dtype: of stored group scales.
        sources: number of KV heads that the inputs come from; the adjacent heads of one KV head
            share their scales. None: each input has its own scale.
        head_dim: inputs per head.
        shares: shares of a group's range to try; see `choose_steps`.
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
    """Average over the heads of each KV head and repeat the mean: (in_features,)."""
    heads = magnitude.view(sources, -1, head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def _loss(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    scheme: GroupedScheme,
    dtype: torch.dtype,
    shares: tuple[float, ...],
) -> float:
    scaled = weight * scales
    energy = hessian.diagonal() / scales.square()
    steps = choose_grid(scaled, scheme, dtype, importance=energy, shares=shares)
    lost = steps.weights(steps.codes(scaled)) / scales - weight
    return float(((lost @ hessian) * lost).sum())
