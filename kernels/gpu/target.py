"""The target of Triton's kernels, and what it can do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from appliance.errors import ConfigError
from appliance.kernels.gpu.cards import folder_of_library

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


def open_driver() -> None:
    """Build what Triton talks to the driver with, for its first kernel or before.

    Raises:
        ConfigError: the compiler, Python's header files or libcuda are missing.
    """
    if triton.knobs.runtime.interpret:
        return
    # Triton looks for libcuda in ldconfig's cache, which containers and NixOS lack.
    if triton.knobs.nvidia.libcuda_path is None and (folder := folder_of_library()):
        triton.knobs.nvidia.libcuda_path = str(folder)
    with naming_what_is_missing():
        triton.runtime.driver.active.get_current_target()


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Raise ConfigError where Triton cannot build what launches kernels; let other errors pass."""
    try:
        yield
    except (RuntimeError, OSError, AssertionError, subprocess.CalledProcessError) as error:
        said = str(error)
        if isinstance(error, subprocess.CalledProcessError) or "C compiler" in said:
            fix = "install a C compiler and Python's header files (on Debian and Ubuntu gcc and"
            fix += " python3-dev)"
        elif "ldconfig" in said or "libcuda" in said:
            fix = "set TRITON_LIBCUDA_PATH to the folder that holds libcuda.so.1"
        else:
            raise
        raise ConfigError(
            f"Triton cannot build what launches kernels on the GPU: {said.strip()}; {fix}, or use"
            " --device cpu"
        ) from error


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
