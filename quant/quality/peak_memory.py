"""The most memory that a part of this process's life took."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class PeakMemory:
    """Begins to watch when it is made.

    Linux can begin its high-water mark anew; where it cannot, the mark is of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            (_PROC / "clear_refs").write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peaks(self) -> tuple[int, int]:
        """Bytes of memory and of the GPU's."""
        vram = 0
        if self._device.type == "cuda":
            vram = torch.cuda.max_memory_allocated(self._device)
        try:
            found = re.search(r"VmHWM:\s*(\d+) kB", (_PROC / "status").read_text())
        except OSError:
            found = None
        if found is not None:
            return int(found[1]) * 1024, vram
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, vram
