"""Launches block moves, with a table of the layers' addresses that is built once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.block_copy.kernel import block_copy_kernel
from appliance.kernels.block_copy.reference import block_bytes
from appliance.kernels.gpu.direct_launch import Launcher, device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.cache.kv_cache import KVPages

BLOCK = 4096  # words that a program moves
NUM_WARPS = 8  # four loads of 16 bytes in flight per thread
WORD = 4  # bytes
ALIGNMENT = 16  # bytes, of pages and of what torch allocates
_launch_block_copy = Launcher(block_copy_kernel)


class BlockMover:
    """Moves the blocks of one cache; `reference` defines the moves.

    Moves are enqueued in the current stream; nothing waits for the device.

    Args:
        layers: all of a cache, on one device.
    """

    def __init__(self, layers: Sequence[KVPages]) -> None:
        self._layers = tuple(layers)
        self._device = layers[0].pages.device
        self._sizes = [layer.pages[0].numel() // WORD for layer in layers]
        self._words = layers[0].pages.view(torch.int32)  # the base of all offsets
        self._inside = self._table(self._places(), self._places())

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all layers: a row of a staging buffer."""
        return block_bytes(self._layers)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks inside the cache; no block is both a source and a destination."""
        assert not set(sources) & set(destinations)
        self._launch(self._inside, sources, destinations)

    def swap_out(self, blocks: Sequence[int], staging: Tensor) -> None:
        """Gather blocks into staging (len(blocks), block_bytes) uint8, on the cache's device.

        One asynchronous copy then brings them to pinned host memory.
        """
        table = self._table(self._places(), self._staged(staging, len(blocks)))
        self._launch(table, blocks, range(len(blocks)))

    def swap_in(self, staging: Tensor, blocks: Sequence[int]) -> None:
        """Write the bytes of `swap_out` back, into the same or other blocks."""
        table = self._table(self._staged(staging, len(blocks)), self._places())
        self._launch(table, range(len(blocks)), blocks)

    def _places(self) -> list[tuple[int, int]]:
        """Return the offset and stride of every layer's blocks, in words."""
        offsets = [self._offset(layer.pages) for layer in self._layers]
        return list(zip(offsets, self._sizes, strict=True))

    def _offset(self, tensor: Tensor) -> int:
        distance = tensor.data_ptr() - self._words.data_ptr()
        assert distance % ALIGNMENT == 0, distance
        return distance // WORD

    def _staged(self, staging: Tensor, rows: int) -> list[tuple[int, int]]:
        assert staging.dtype == torch.uint8
        assert staging.device == self._device
        assert staging.is_contiguous()
        assert staging.shape == (rows, self.block_bytes), staging.shape
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        first = self._offset(staging)
        return [(first + start, self.block_bytes // WORD) for start in starts]

    def _table(self, sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> Tensor:
        rows = [
            (*source, *target, size)
            for source, target, size in zip(sources, targets, self._sizes, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)

    def _launch(self, table: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not len(sources):
            return
        pairs = list(zip(sources, targets, strict=True))
        moves = torch.tensor(pairs, dtype=torch.int64).to(self._device, non_blocking=True)
        parts = -(-max(self._sizes) // BLOCK)
        with device_of(self._layers[0].pages):
            _launch_block_copy(
                (len(pairs), len(self._layers), parts),
                (self._words, table, moves),
                {"BLOCK": BLOCK, "num_warps": NUM_WARPS},
            )
