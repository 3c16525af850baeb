"""Gated activation as it is defined, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Gating


def gated_activation(gate_up: Tensor, activation: Gating, up: Tensor | None = None) -> Tensor:
    """Compute act(gate) * up, or the activation's own formula.

    Args:
        gate_up: (num_tokens, 2 * intermediate), the gate in the first half; the gate alone if `up`
            is apart.
        up: (num_tokens, intermediate), or None.

    Returns:
        (num_tokens, intermediate), dtype of gate_up.
    """
    gate, up = gate_up.float().chunk(2, dim=-1) if up is None else (gate_up.float(), up.float())
    if isinstance(activation, ClampedSwiGLU):
        limit = activation.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        gated = gate * torch.sigmoid(activation.alpha * gate)
    elif isinstance(activation, BoundedSwiGLU):
        limit = activation.limit
        gated, up = activated(gate, Activation.SILU).clamp(max=limit), up.clamp(-limit, limit)
    else:
        gated = activated(gate, activation)
    return (gated * up).to(gate_up.dtype)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Compute act(x) in float32, and round it to the dtype of x."""
    wide = x.float()
    match activation:
        case Activation.SILU:
            result = wide * torch.sigmoid(wide)
        case Activation.GELU_TANH:
            inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
            result = 0.5 * wide * (1 + torch.tanh(inner))
        case Activation.RELU_SQUARED:
            result = wide.relu().square()
        case Activation.RELU:
            result = wide.relu()
        case Activation.GELU:
            result = 0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))
        case Activation.QUICK_GELU:
            result = wide * torch.sigmoid(1.702 * wide)
    return result.to(x.dtype)


def gate_heads(heads: Tensor, gates: Tensor) -> Tensor:
    """Multiply by the sigmoids of gates, in float32 and rounded to the dtype of the heads.

    Args:
        heads: (num_tokens, num_heads, head_dim).
        gates: same shape, or (num_tokens, num_heads, 1).

    Returns:
        Like heads.
    """
    return heads * gates.float().sigmoid().to(heads.dtype)
