"""Memory of this process, as the system and torch account for it."""

from __future__ import annotations

import ctypes
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """In bytes.

    Attributes:
        ram: resident now: heap, stacks, and the pages of libraries that were touched.
        peak_ram: the most since the process began.
        vram: allocated by torch on the GPU now.
        peak_vram: the most since the process began.
    """

    ram: int
    peak_ram: int
    vram: int
    peak_vram: int

    @classmethod
    def now(cls, device: torch.device) -> MemoryUse:
        """Of this process and one device."""
        vram = peak_vram = 0
        if device.type == "cuda":
            vram = torch.cuda.memory_allocated(device)
            peak_vram = torch.cuda.max_memory_allocated(device)
        return cls(psutil.Process().memory_info().rss, peak_ram(), vram, peak_vram)


def release_unused() -> None:
    """Give memory that the C library keeps for later back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_ram() -> int:
    """The most bytes of memory that this process had, since it began or the mark was cleared.

    The one of getrusage begins with what the parent process had, so it is the second choice.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
