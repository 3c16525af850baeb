"""Chooses whether a kernel starts before the one before it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.target import target_of

if TYPE_CHECKING:
    import torch

LEAST_DEPENDENT = 90  # compute capability


def starts_early(device: torch.device) -> bool:
    """Return True if kernels of a device can start early; the interpreter's never do."""
    target = target_of(device)
    return target.capability >= LEAST_DEPENDENT and not target.is_interpreted


def early_options(*, early: bool) -> dict[str, bool]:
    """Return Triton's launch options of a kernel that calls `wait_for_previous` if `early`."""
    return {"launch_pdl": True} if early else {}
