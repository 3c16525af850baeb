"""Norms and rotary embedding by definition, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.norm_rope.weights import NormWeights
    from appliance.kernels.operations import AddNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: (..., dim).
        weight: (dim,) float32.
        eps: added to the mean square.

    Returns:
        Like x; rounded to its dtype once, at the end.
    """
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.

    Arguments and result as for `rms_norm`.
    """
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_norm_with(rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> AddNorm:
    """Build `add_norm` from a backend's RMS norm."""

    def norm_of(x: Tensor, norm: NormWeights) -> Tensor:
        if norm.weight.dim() > 1:
            return torch.stack([rms_norm(x, weight, norm.eps) for weight in norm.weight])
        if norm.bias is None:
            return rms_norm(x, norm.weight, norm.eps)
        return layer_norm(x, norm.weight, norm.bias, norm.eps)

    def add_norm(
        added: Tensor,
        stream: Tensor,
        norm: NormWeights | None,
        *,
        post: NormWeights | None = None,
        beside: Tensor | None = None,
        parts: tuple[NormWeights, NormWeights] | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Add a layer's output to the stream and norm the sum; each step rounds to its dtype.

        Args:
            added: (num_rows, dim).
            stream: same shape and dtype.
            norm: of the sum, or None.
            post: RMS norm of what is added.
            beside: like added; it is added to that first.
            parts: RMS norms of `added` and of `beside`, before.
            scale: multiplies the sum.

        Returns:
            The norm of the sum, and the sum.
        """
        if parts is not None:
            assert beside is not None
            added, beside = norm_of(added, parts[0]), norm_of(beside, parts[1])
        if beside is not None:
            added = added + beside
        if post is not None:
            added = norm_of(added, post)
        total = added + stream
        if scale is not None:
            total = total * scale
        return None if norm is None else norm_of(total, norm), total

    return add_norm


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i with element i + rotary_dim / 2 by the row's angles.

    Args:
        x: (num_tokens, heads, head_dim).
        cos: (num_tokens, rotary_dim / 2) float32. Where rotary_dim is below head_dim, the
            elements beyond it pass unchanged.
        sin: same shape.

    Returns:
        Like x.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)
