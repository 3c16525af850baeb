"""Processes and their C libraries: what they read as they are loaded, memory, what children see.

A leaf; sets nothing by itself.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# OpenMP threads that spin at a barrier starve each other as soon as another process needs a core:
# 150 small matmuls on 2 cores took 83 ms (median) beside a busy process and 3.5 alone. With this
# limit they took 7 to 16 and 3.4; without any spinning 13 and 10.
OPENMP = {"GOMP_SPINCOUNT": "1000"}

# Activations of a step are freed and allocated again in the next. Giving them back to the system in
# between costs page faults in every layer: up to four times the time of attention.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}

# What only a server and its clients have to know.
SECRETS = frozenset({"APPLIANCE_API_KEY"})


def child_environment(**more: str) -> dict[str, str]:
    """The environment for a process that is to know no API key.

    Args:
        more: variables that it gets besides, or instead.
    """
    return {name: text for name, text in os.environ.items() if name not in SECRETS} | more


def limit_spinning() -> None:
    """Set `OPENMP` for this process; it has an effect before torch is imported only."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)


def release_unused() -> None:
    """Give memory that the C library keeps for later back to the system, where it can."""
    import ctypes  # every command imports this file, and hardly any needs that

    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Memory that this process has now, its libraries' pages included: RES in `top`.

    Others that have the same libraries loaded change nothing about it, as they would about a share.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
