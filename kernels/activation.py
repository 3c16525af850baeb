"""The activation functions of an MLP. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypedDict


class Activation(Enum):
    """act in down(act(gate(x)) * up(x)), or in down(act(up(x)))."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU_SQUARED = "relu_squared"  # arXiv 2109.08668
    RELU = "relu"
    GELU = "gelu"  # by the error function
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """g * sigmoid(alpha * g) * (u + 1) instead of act(gate) * up (gpt-oss).

    g is the gate, clamped to at most `limit`; u is up, clamped to -limit..limit.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class BoundedSwiGLU:
    """min(silu(gate), limit) * u, where u is up clamped to -limit..limit (Step 3.7)."""

    limit: float


Gating = Activation | ClampedSwiGLU | BoundedSwiGLU


class GateConstexprs(TypedDict):
    """The compile-time arguments by which kernels know a gate."""

    ACTIVATION: str | None
    LIMIT: float
    ALPHA: float


def gate_constexprs(activation: Gating | None) -> GateConstexprs:
    """Describe a gate, or that there is none."""
    match activation:
        case None:
            return {"ACTIVATION": None, "LIMIT": 0.0, "ALPHA": 0.0}
        case ClampedSwiGLU(limit, alpha):
            return {"ACTIVATION": "clamped_swiglu", "LIMIT": limit, "ALPHA": alpha}
        case BoundedSwiGLU(limit):
            return {"ACTIVATION": "bounded_swiglu", "LIMIT": limit, "ALPHA": 0.0}
        case Activation():
            return {"ACTIVATION": activation.value, "LIMIT": 0.0, "ALPHA": 0.0}
