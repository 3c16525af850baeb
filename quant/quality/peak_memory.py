"""The most memory that a part of this process's life took."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from appliance.quant.run.memory import peak_ram

_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Begins to watch when it is made.

    Linux can begin its high-water mark anew; where it cannot, the mark is of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peaks(self) -> tuple[int, int]:
        """Bytes of memory and of the GPU's."""
        vram = 0
        if self._device.type == "cuda":
            vram = torch.cuda.max_memory_allocated(self._device)
        return peak_ram(), vram
