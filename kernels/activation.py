"""The nonlinearities that a gated MLP can have. Imports nothing."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    """act in down(act(gate(x)) * up(x))."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
