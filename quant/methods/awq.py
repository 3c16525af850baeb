"""AWQ: scales give large inputs finer steps; the norm or linear before divides them out.

From Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, https://arxiv.org/abs/2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from appliance.quant.formats.scheme import Fp8Scheme, TrellisScheme
from appliance.quant.methods import data_free
from appliance.quant.methods.ranges import SHRUNK, WHOLE, choose_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.model.norm import Norm
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme
    from appliance.quant.run.options import QuantizedWeight
    from appliance.quant.walk.block import Moments, TransformerBlock

EXPONENTS = tuple(step / 20 for step in range(20))
LARGEST_SCALE = 1e4  # its inverse is the smallest; both are far from float16's limits


def quantize_linear(
    weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
) -> QuantizedWeight:
    """Quantize a weight in ranges chosen by the energy of its inputs; see `Quantizer`."""
    assert not isinstance(scheme, TrellisScheme), "a method of its own"
    if hessian is None or isinstance(scheme, Fp8Scheme):
        return data_free.quantize_linear(weight, None, scheme, dtype)
    grid = choose_grid(weight, scheme, dtype, importance=hessian.diagonal(), shares=SHRUNK)
    return grid.pack(grid.codes(weight))


def scale_inputs(
    block: TransformerBlock,
    moments: list[Moments],
    schemes: list[GroupedScheme | None],
    dtype: torch.dtype,
    norm_offset: float,
) -> list[InputScales]:
    """Choose scales for the inputs of a layer's four linears and fold them in.

    Args:
        block: changed in place; its outputs stay the same.
        moments: of its linears' inputs, in their order.
        schemes: of its linears; None leaves a linear's inputs alone.
        dtype: of stored scales and norms.
        norm_offset: what the model adds to a norm's stored weight.

    Returns:
        The folded scales of the linears with a scheme, in their order.
    """
    attention = block.attention.spec
    queries = attention.num_heads // attention.num_kv_heads
    first_value = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    values = slice(first_value, block.qkv.out_features)
    ups = slice(block.gate_up.out_features // 2, block.gate_up.out_features)

    def into_values(scales: Tensor) -> Tensor:
        heads = scales.view(attention.num_kv_heads, queries, attention.head_dim)
        block.qkv.scale_outputs(values, heads[:, 0].reshape(-1))
        return scales

    def into_ups(scales: Tensor) -> Tensor:
        block.gate_up.scale_outputs(ups, scales)
        return scales

    def into_norm(norm: Norm) -> Callable[[Tensor], Tensor]:
        return lambda scales: _scale_norm(norm, scales, dtype, norm_offset)

    places: list[tuple[Callable[[Tensor], Tensor], int | None]] = [
        (into_norm(block.mixer_norm), None),
        (into_values, attention.num_kv_heads),
        (into_norm(block.mlp_norm), None),
        (into_ups, None),
    ]
    found = []
    for linear, seen, scheme, (fold, heads) in zip(
        block.linears(), moments, schemes, places, strict=True
    ):
        if scheme is None:
            continue
        chosen = choose_scales(
            [linear.weight],
            seen.hessian,
            seen.magnitude,
            scheme,
            dtype,
            sources=heads,
            head_dim=attention.head_dim,
        )
        exact = fold(chosen.scales)
        linear.scale_inputs(exact)
        found.append(replace(chosen, scales=exact))
    return found


def _scale_norm(norm: Norm, scales: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    """Divide a norm's weight by scales and round it to its stored type.

    Returns:
        The scales that the rounded weight represents exactly.
    """
    stored = (norm.weight / scales - offset).to(dtype).float() + offset
    usable = (stored != 0) & (norm.weight != 0)
    exact = torch.where(usable, norm.weight / stored, torch.ones_like(scales))
    norm.weight.copy_(torch.where(usable, stored, norm.weight))
    return exact


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
