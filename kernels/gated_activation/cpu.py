"""Gated activation in two torch calls, each of which rounds once to the dtype of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from appliance.kernels.activation import Activation

if TYPE_CHECKING:
    from torch import Tensor


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `reference.gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            activated = functional.silu(gate)
        case Activation.GELU_TANH:
            activated = functional.gelu(gate, approximate="tanh")
    return activated.mul_(up)
