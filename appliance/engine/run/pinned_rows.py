"""Pinned host memory in rows of one size."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.run.device import Device

PIECE_BYTES = 64 << 20
MOST_ROWS = 256  # per piece


class PinnedRows:
    """Rows that become free when nothing refers to them."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._free: list[Tensor] = []

    def take(self) -> tuple[Tensor, memoryview]:
        """Take a row, (num_bytes,) uint8, and its bytes; dropping both frees it."""
        if not self._free:
            count = max(1, min(MOST_ROWS, PIECE_BYTES // self._num_bytes))
            piece = self._device.pinned(count * self._num_bytes)
            self._free += piece.view(count, self._num_bytes).unbind()
        row = self._free.pop()
        array = row.numpy()
        weakref.finalize(array, self._free.append, row).atexit = False
        return row, array.data
