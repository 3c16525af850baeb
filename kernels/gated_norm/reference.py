"""The gated norm behind a recurrent state by definition, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.norm_rope.weights import NormWeights


def gated_norm(
    x: Tensor,
    gate: Tensor,
    norm: NormWeights,
    dtype: torch.dtype,
    *,
    width: int,
    gates_first: bool,
    skip: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Take the RMS norm of neighbours, times silu(gate).

    Args:
        x: (num_tokens, dim) float32.
        gate: (num_tokens, dim), any float dtype.
        norm: weight (width,), the same for all neighbours, or (dim,).
        dtype: of the result.
        width: elements that have a mean square of their own.
        gates_first: gate x, not its norm.
        skip: (num_tokens, num_heads, head_dim) float32 and (num_heads,) float32, whose product is
            added to x.

    Returns:
        (num_tokens, dim), rounded once.
    """
    if skip is not None:
        values, factors = skip
        x = x + (factors.unsqueeze(1) * values).flatten(1)
    gate = silu(gate.float())
    if gates_first:
        x = x * gate
    parts = x.unflatten(-1, (-1, width))
    parts = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + norm.eps)
    normed: Tensor = (parts * norm.weight.view(-1, width)).flatten(1)
    return (normed if gates_first else normed * gate).to(dtype)
