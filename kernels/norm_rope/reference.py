"""RMS norm and rotary embedding by definition, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


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


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) and the sum, rounded to its dtype before the norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


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
