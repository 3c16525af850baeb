"""Measures the peak memory of a part of the process's life."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from appliance.quant.run.memory import peak_ram

_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures from its construction on.

    Linux can reset its high-water mark; if it cannot, the mark covers the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peaks(self) -> tuple[int, int]:
        """Return peak bytes of memory and of GPU memory."""
        vram = 0
        if self._device.type == "cuda":
            vram = torch.cuda.max_memory_allocated(self._device)
        return peak_ram(), vram
