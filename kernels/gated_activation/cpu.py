"""Gated activation in two torch calls, each of which rounds to the dtype of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.gated_activation import reference

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Gating


def gated_activation(gate_up: Tensor, activation: Gating, up: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    match activation:
        case Activation.SILU:
            activated = functional.silu(gate)
        case Activation.GELU_TANH:
            activated = functional.gelu(gate, approximate="tanh")
        case Activation.RELU_SQUARED:
            activated = functional.relu(gate).square_()
        case Activation.RELU:
            activated = functional.relu(gate)
        case Activation.GELU:
            activated = functional.gelu(gate)
        case Activation.QUICK_GELU:
            activated = reference.activated(gate, activation)  # rounds once
        case ClampedSwiGLU() | BoundedSwiGLU():
            return reference.gated_activation(gate, activation, up)  # rounds once
    return activated.mul_(up)
