"""Launches the gated activation: checks and the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.gated_activation.kernel import gated_activation_kernel
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Gating

BLOCK = 1024  # columns of a program: 8 for each thread of 4 warps, one 16-byte load of BF16 each
NUM_WARPS = 4
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COVERED = (Activation.SILU, Activation.GELU_TANH)
_launch_gated = Launcher(gated_activation_kernel)


def gated_activation(gate_up: Tensor, activation: Gating, *, run: int = 0) -> Tensor:
    """See `reference.gated_activation`.

    Args:
        gate_up: (num_tokens, 2 * intermediate) bfloat16, float16 or float32, the gate in the first
            half of each row.
        run: columns of gate and of up that alternate in a row; 0 means halves.

    Raises:
        UnsupportedModelError: no kernel covers the dtype or the activation.
    """
    num_tokens, width = gate_up.shape
    if gate_up.dtype not in FLOAT_DTYPES:
        raise UnsupportedModelError(
            f"the gated activation on the GPU has no kernel for {gate_up.dtype}; "
            f"supported: {', '.join(map(str, FLOAT_DTYPES))}"
        )
    if isinstance(activation, Activation) and activation not in COVERED:
        raise UnsupportedModelError(
            f"the gated activation on the GPU has no kernel for {activation.value}"
        )
    assert gate_up.stride(1) == 1, gate_up.stride()
    assert width % (2 * max(run, 1)) == 0, (width, run)
    intermediate = width // 2
    output = gate_up.new_empty(num_tokens, intermediate)
    if num_tokens:
        early = starts_early(gate_up.device)
        options = {
            **constexprs(activation),
            "RUN": run,
            "BLOCK": BLOCK,
            "EARLY": early,
            "num_warps": NUM_WARPS,
            **early_options(early=early),
        }
        arguments = output, gate_up, intermediate, gate_up.stride(0)
        with device_of(gate_up):
            _launch_gated((num_tokens, -(-intermediate // BLOCK)), arguments, options)
    return output


def constexprs(activation: Gating) -> dict[str, str | float]:
    """Return the compile-time arguments that describe the gate."""
    if isinstance(activation, ClampedSwiGLU):
        limit, alpha = activation.limit, activation.alpha
        return {"ACTIVATION": "clamped_swiglu", "LIMIT": limit, "ALPHA": alpha}
    if isinstance(activation, BoundedSwiGLU):
        return {"ACTIVATION": "bounded_swiglu", "LIMIT": activation.limit, "ALPHA": 0.0}
    return {"ACTIVATION": activation.value, "LIMIT": 0.0, "ALPHA": 0.0}
