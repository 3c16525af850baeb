"""Launches activations: checks and the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation, gate_constexprs
from appliance.kernels.gated_activation import reference
from appliance.kernels.gated_activation.kernel import gate_heads_kernel, gated_activation_kernel
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.activation import Gating

BLOCK = 1024  # columns of a program: 8 for each thread of 4 warps, one 16-byte load of BF16 each
NUM_WARPS = 4
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_launch_gated = Launcher(gated_activation_kernel)
_launch_gate_heads = Launcher(gate_heads_kernel)


def gated_activation(
    gate_up: Tensor, activation: Gating, up: Tensor | None = None, *, run: int = 0
) -> Tensor:
    """See `reference.gated_activation`.

    Args:
        gate_up: (num_tokens, 2 * intermediate) bfloat16, float16 or float32, the gate in the first
            half of each row; the gate alone if `up` is apart.
        up: (num_tokens, intermediate), same dtype.
        run: columns of gate and of up that alternate in a row; 0 means halves.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    if activation is Activation.QUICK_GELU:
        assert not run, "no tower's gates alternate"
        return reference.gated_activation(gate_up, activation, up)
    width = gate_up.shape[1]
    assert width % (2 * max(run, 1)) == 0 or up is not None, (width, run)
    fixed = {**gate_constexprs(activation), "GATED": True, "RUN": run}
    return _launch(gate_up, up, width // 2 if up is None else width, fixed)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """See `reference.activated`; x is (num_tokens, width) bfloat16, float16 or float32.

    The reference computes quick GELU, which towers of pictures alone have.

    Raises:
        UnsupportedModelError: no kernel covers the dtype.
    """
    if activation is Activation.QUICK_GELU:
        return reference.activated(x, activation)
    return _launch(x, None, x.shape[1], {**gate_constexprs(activation), "GATED": False, "RUN": 0})


def gate_heads(heads: Tensor, gates: Tensor) -> Tensor:
    """See `reference.gate_heads`.

    Args:
        heads: (num_tokens, num_heads, head_dim) bfloat16, float16 or float32.
        gates: same shape and dtype, or (num_tokens, num_heads, 1); rows may lie apart.
    """
    num_tokens, num_heads, head_dim = heads.shape
    assert gates.shape[:2] == heads.shape[:2], (gates.shape, heads.shape)
    assert gates.shape[2] in (1, head_dim), (gates.shape, heads.shape)
    assert heads.is_contiguous(), heads.stride()
    assert gates.stride(1) == gates.shape[2], gates.stride()
    output = torch.empty_like(heads)
    width = num_heads * head_dim
    if num_tokens:
        arguments = output, heads, gates, width, head_dim, gates.stride(0)
        of_heads = gates.shape[2] < head_dim
        options = {"OF_HEADS": of_heads, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
        with device_of(heads):
            _launch_gate_heads((num_tokens, -(-width // BLOCK)), arguments, options)
    return output


def _launch(x: Tensor, up: Tensor | None, width: int, fixed: dict[str, Any]) -> Tensor:
    """Compute rows of `width` from those of x, and of up if that is apart."""
    if x.dtype not in FLOAT_DTYPES:
        raise UnsupportedModelError(
            f"the activation on the GPU has no kernel for {x.dtype}; "
            f"supported: {', '.join(map(str, FLOAT_DTYPES))}"
        )
    for rows in (x, up):
        assert rows is None or (rows.stride(1) == 1 and rows.dtype == x.dtype)
    num_tokens = len(x)
    output = x.new_empty(num_tokens, width)
    if num_tokens:
        early = starts_early(x.device)
        options = {
            **fixed,
            "BLOCK": BLOCK,
            "EARLY": early,
            "num_warps": NUM_WARPS,
            **early_options(early=early),
        }
        arguments = output, x, up, width, x.stride(0), 0 if up is None else up.stride(0)
        with device_of(x):
            _launch_gated((num_tokens, -(-width // BLOCK)), arguments, options)
    return output
