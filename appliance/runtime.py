"""Settings of processes and their C libraries: environment, memory, threads.

A leaf; sets nothing when imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from pathlib import Path
from typing import Any

# OpenMP threads that spin at a barrier starve each other as soon as another process needs a core:
# 150 small matmuls on 2 cores took 83 ms (median) beside a busy process and 3.5 alone. With this
# limit they took 7 to 16 and 3.4; without any spinning 13 and 10.
OPENMP = {"GOMP_SPINCOUNT": "1000"}

# A step frees its activations and the next allocates them again. Returning them to the system in
# between costs page faults in every layer: up to four times the time of attention.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}

# Share of free memory left to the rest of the system.
HOST_RESERVE = 0.10

# Indices or ids of the GPUs that CUDA shows a process.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

# Secrets of a server and its clients.
SECRETS = frozenset({"APPLIANCE_API_KEY"})

_PR_SET_PDEATHSIG = 1


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment for a child process, without API keys."""
    return {name: text for name, text in os.environ.items() if name not in SECRETS} | more


def limit_spinning() -> None:
    """Set `OPENMP` for this process; call it before torch is imported."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)


def release_unused() -> None:
    """Return the C library's unused memory to the system, where supported."""
    import ctypes  # few commands need it, and all import this file

    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Free temporary memory of the start, and exempt the rest from garbage collection.

    Building the tokenizer leaves free lists: 7 MiB for a vocabulary of 49 thousand, 38 MiB for one
    of 262 thousand. A full collection stalls all streams for 15 ms and finds nothing in loaded
    objects.
    """
    gc.collect()
    gc.freeze()
    release_unused()


def visible_gpus() -> list[str] | None:
    """Return the indices or ids of the GPUs that CUDA shows; None means all."""
    text = os.environ.get(VISIBLE_GPUS)
    if text is None:
        return None
    given = [word.strip() for word in text.split(",")]
    return [word for word in given if word and word != "-1"]


def see_gpus(*gpus: str) -> None:
    """Make CUDA show this process these GPUs, by index or id; call it before CUDA is used."""
    os.environ[VISIBLE_GPUS] = ",".join(gpus)


def free_host_bytes() -> int:
    """Return the available host memory, within a container's limit."""
    import psutil  # few commands need it, and all import this file

    available = psutil.virtual_memory().available
    return int(min(available, _cgroup_headroom()) * (1 - HOST_RESERVE))


def _cgroup_headroom() -> int:
    """Return the bytes below a container's limit, or a huge number without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else int(limit) - used


def resident_bytes() -> int:
    """Return this process's resident memory, shared libraries included: RES in `top`.

    Unlike the proportional share, it does not depend on other processes.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    import ctypes  # few commands need it, and all import this file

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent died before the prctl


def open_nvml(library: Any = None) -> Any:
    """Load NVIDIA's management library; pynvml by default.

    Raises:
        Exception: there is no driver, or it fails; pynvml has a class for each error.
    """
    if library is None:
        import pynvml

        library = pynvml
    library.nvmlInit()
    return library
