"""Pinned host memory for what leaves a cache on a GPU, made before a step asks for it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from appliance.engine.run.device import Device

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
MOST_WASTED = 1 / 8  # of a piece, behind its last row


class PinnedMemory:
    """Pieces of host memory that a device can read and write.

    The driver takes milliseconds for each, which would delay every answer, so a thread makes all of
    them from the start on, one after another.

    Args:
        num_bytes: of all pieces, at most.
        row_bytes: of the largest row that is taken from a piece.
    """

    def __init__(self, device: Device, num_bytes: int, row_bytes: int) -> None:
        self._ready: deque[Tensor] = deque()
        self._has_logged = False
        sizes, dropped = tuple(piece_sizes(num_bytes, row_bytes)), threading.Event()
        self._thread = threading.Thread(
            target=_pin, args=(device, sizes, self._ready, dropped), name="pinning", daemon=True
        )
        weakref.finalize(self, dropped.set)
        self._thread.start()

    def take(self) -> Tensor | None:
        """Take a piece, (num_bytes,) uint8; None if none is ready, without waiting for one."""
        try:
            return self._ready.popleft()
        except IndexError:
            if not self._has_logged:
                logger.info("no pinned memory is left, so the GPU waits for some copies")
                self._has_logged = True
            return None

    def finish(self) -> None:
        """Wait until all pieces are made."""
        self._thread.join()


def _pin(
    device: Device, sizes: Sequence[int], ready: deque[Tensor], dropped: threading.Event
) -> None:
    for size in sizes:
        if dropped.is_set():
            return
        ready.append(device.pinned(size))


def piece_sizes(num_bytes: int, row_bytes: int) -> Iterator[int]:
    """Divide memory into pieces, powers of two: torch rounds up to those.

    Args:
        num_bytes: of all pieces, at most.
        row_bytes: no piece is smaller, and usual ones waste little if they hold such rows.
    """
    size = PIECE_BYTES
    while size % row_bytes > size * MOST_WASTED:
        size *= 2
    while num_bytes >= row_bytes:
        size = min(size, 1 << (num_bytes.bit_length() - 1))
        if size < row_bytes:
            return
        yield size
        num_bytes -= size


class PinnedRows:
    """Rows of one size in pinned memory, which become free when nothing refers to them."""

    def __init__(self, memory: PinnedMemory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self._free: list[Tensor] = []

    def take(self) -> tuple[Tensor, memoryview]:
        """Take a row, (num_bytes,) uint8, and its bytes; dropping both frees it.

        The row is of ordinary memory if no pinned memory is left.
        """
        if not self._free and (piece := self._memory.take()) is not None:
            count = len(piece) // self._num_bytes
            rows = piece[: count * self._num_bytes].view(count, self._num_bytes)
            self._free += rows.unbind()
        if not self._free:
            array = np.empty(self._num_bytes, np.uint8)
            return arrays.of_numpy(array).tensor(), array.data
        row = self._free.pop()
        array = row.numpy()
        weakref.finalize(array, self._free.append, row).atexit = False
        return row, array.data
