"""Launches the soft cap of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.soft_cap.kernel import soft_cap_kernel

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096  # 32 for each thread of 4 warps: several 16-byte loads in flight
NUM_WARPS = 4
_launch_soft_cap = Launcher(soft_cap_kernel)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """See `reference.soft_cap`; NaN stays NaN, and infinity becomes the cap."""
    assert cap > 0, cap
    logits = logits.contiguous()
    output = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if logits.numel():
        with device_of(logits):
            _launch_soft_cap(
                (-(-logits.numel() // BLOCK),),
                (
                    output,
                    logits,
                    logits.numel(),
                    cap,
                ),
                {"BLOCK": BLOCK, "num_warps": NUM_WARPS},
            )
    return output
