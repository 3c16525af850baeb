"""Launches the rotation of inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import early_options, starts_early
from appliance.kernels.rotation.kernel import rotate_kernel
from appliance.kernels.weights.trellis import BLOCK, SIGNS

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 16  # of a program: 8 inputs for each thread, a 16-byte load
NUM_WARPS = 4
_launch_rotate = Launcher(rotate_kernel)


class RotateConstexprs(TypedDict):
    """The compile-time arguments of `rotate_kernel`."""

    NEGATIVE: int
    SIZE: int
    BLOCKS: int
    EARLY: bool


def rotate_constexprs(*, early: bool) -> RotateConstexprs:
    """Return the compile-time arguments of `rotate_kernel`."""
    negative = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
    return {"NEGATIVE": negative, "SIZE": BLOCK, "BLOCKS": BLOCKS, "EARLY": early}


def rotated(x: Tensor) -> Tensor:
    """See `reference.rotated`; rows of x may lie apart."""
    assert x.shape[1] % BLOCK == 0, x.shape
    assert x.stride(1) == 1, x.stride()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        early = starts_early(x.device)
        options = {
            **rotate_constexprs(early=early),
            "num_warps": NUM_WARPS,
            **early_options(early=early),
        }
        grid = len(x), -(-x.shape[1] // (BLOCKS * BLOCK))
        with device_of(x):
            _launch_rotate(grid, (out, x, x.shape[1], x.stride(0)), options)
    return out
