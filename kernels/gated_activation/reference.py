"""Gated activation as it is defined, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from appliance.kernels.activation import Activation

if TYPE_CHECKING:
    from torch import Tensor


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: (num_tokens, 2 * intermediate), the gate in the first half.
        activation: the nonlinearity.

    Returns:
        (num_tokens, intermediate), dtype of gate_up.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            activated = gate * torch.sigmoid(gate)
        case Activation.GELU_TANH:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            activated = 0.5 * gate * (1 + torch.tanh(inner))
    return (activated * up).to(gate_up.dtype)
