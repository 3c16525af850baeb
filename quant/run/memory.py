"""Reads this process's memory use from the system and torch."""

from __future__ import annotations

import ctypes
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")
_MAPPED_FROM = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes.

    Attributes:
        ram: resident now.
        peak_ram: peak since the process began.
        vram: allocated by torch on the GPU now.
        peak_vram: peak since the process began.
    """

    ram: int
    peak_ram: int
    vram: int
    peak_vram: int

    @classmethod
    def now(cls, device: torch.device) -> MemoryUse:
        vram = peak_vram = 0
        if device.type == "cuda":
            vram = torch.cuda.memory_allocated(device)
            peak_vram = torch.cuda.max_memory_allocated(device)
        return cls(psutil.Process().memory_info().rss, peak_ram(), vram, peak_vram)


def return_large_blocks() -> None:
    """Make glibc return large blocks to the system when they are freed.

    By default glibc learns to keep blocks of up to 32 MiB, and the gaps between used ones grow from
    layer to layer, differently in each run: an AWQ run peaked 2 to 10 % above its trial; with this
    it stays within 2 %. The page faults cost about a fifth more CPU time on a small model, so this
    is for runs with a ceiling. Without glibc it does nothing.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(_MAPPED_FROM, _LARGE)


def peak_ram() -> int:
    """Return peak bytes of memory since the process began or the mark was reset.

    getrusage's mark starts at the parent process's, so it is the second choice.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
