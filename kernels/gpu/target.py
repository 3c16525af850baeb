"""The target of Triton's kernels, and what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

STAND_IN = 80  # compute capability whose tiles the interpreter uses
LEAST_DEPENDENT = 90  # compute capability from which a kernel can start before the last has ended


@dataclass(frozen=True, slots=True)
class Target:
    """A target of compilation.

    Attributes:
        capability: compute capability (86 is 8.6).
        is_interpreted: Triton interprets kernels on the CPU, without PTX and tensor cores.
    """

    capability: int
    is_interpreted: bool = False


@lru_cache
def target_of(device: torch.device) -> Target:
    """Return the target of kernels launched for tensors on a device."""
    if triton.knobs.runtime.interpret:
        return Target(STAND_IN, is_interpreted=True)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return Target(triton.runtime.driver.active.get_current_target().arch)


def starts_early(device: torch.device) -> bool:
    """Return True if kernels of a device can start early; the interpreter's never do."""
    target = target_of(device)
    return target.capability >= LEAST_DEPENDENT and not target.is_interpreted


def early_options(*, early: bool) -> dict[str, bool]:
    """Return Triton's launch options of a kernel that calls `wait_for_previous` if `early`."""
    return {"launch_pdl": True} if early else {}
