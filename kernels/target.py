"""The target of Triton's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

STAND_IN = 80  # compute capability whose tiles the interpreter uses


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
