"""Which blocks lie under which pixel of the block map, so that the whole area is used.

With more blocks than pixels each pixel stands for a bucket of neighbours, all buckets equal but
for one block. With fewer, each block is a tile of a grid that wastes as few pixels as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_BLOCK = -1
_STRETCH = 1.6  # a tile may be this much off square if that leaves fewer pixels without a block


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_blocks` blocks on `width` x `height` pixels, in reading order."""

    num_blocks: int
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        """Pixels of the area."""
        return self.width * self.height

    @property
    def dense(self) -> bool:
        """Whether a pixel stands for one block or more."""
        return self.num_blocks >= self.num_pixels

    @property
    def blocks_per_pixel(self) -> float:
        """Mean size of a bucket; below one when blocks are tiles."""
        return self.num_blocks / self.num_pixels if self.num_pixels else 0.0

    def blocks_at(self, x: int, y: int) -> range:
        """The blocks under one pixel: none, one, or a bucket."""
        pixel = y * self.width + x
        if self.dense:
            starts = _bucket_starts(self)
            end = starts[pixel + 1] if pixel + 1 < self.num_pixels else self.num_blocks
            return range(int(starts[pixel]), int(end))
        block = int(_tiles(self)[y, x])
        return range(0) if block == NO_BLOCK else range(block, block + 1)

    def shown(self, ranks: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The block that stands for each pixel: of its bucket, the first with the highest rank.

        Args:
            ranks: (num_blocks,) importance of each block, below 2**32.

        Returns:
            (height, width) block indices, or `NO_BLOCK`.
        """
        assert ranks.shape == (self.num_blocks,)
        if not self.dense or not self.num_pixels:
            return _tiles(self)
        # One maximum per bucket finds the block too: it rides in the low bits, counted backwards.
        backwards = np.arange(self.num_blocks - 1, -1, -1, dtype=np.uint64)
        best = np.maximum.reduceat(ranks << np.uint64(32) | backwards, _bucket_starts(self))
        blocks = self.num_blocks - 1 - (best & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return blocks.reshape(self.height, self.width)


@lru_cache(maxsize=4)
def _bucket_starts(grid: Grid) -> NDArray[np.int64]:
    """(num_pixels,) first block of each bucket; strictly increasing."""
    return np.arange(grid.num_pixels, dtype=np.int64) * grid.num_blocks // grid.num_pixels


@lru_cache(maxsize=4)
def _tiles(grid: Grid) -> NDArray[np.int64]:
    """(height, width) block of each pixel, or `NO_BLOCK` past the last one."""
    if not grid.num_blocks or not grid.num_pixels:
        return np.full((grid.height, grid.width), NO_BLOCK, dtype=np.int64)
    columns, rows = _tile_counts(grid)
    column = np.arange(grid.width) * columns // grid.width
    row = np.arange(grid.height) * rows // grid.height
    block = row[:, None] * columns + column
    return np.where(block < grid.num_blocks, block, NO_BLOCK)


def _tile_counts(grid: Grid) -> tuple[int, int]:
    """Columns and rows: nearly square tiles, few of them empty."""
    ideal = sqrt(grid.num_blocks * grid.height / grid.width)  # rows of square tiles
    best: tuple[float, int, int] | None = None
    for rows in range(1, grid.height + 1):
        columns = -(-grid.num_blocks // rows)
        if columns > grid.width:
            continue
        stretch = max(rows / ideal, ideal / rows)
        empty = rows * columns - grid.num_blocks
        cost = empty / grid.num_blocks + (stretch - 1) / 100
        if stretch > _STRETCH:
            cost += stretch * grid.num_pixels  # only where nothing squarer fits
        if best is None or cost < best[0]:
            best = (cost, columns, rows)
    assert best is not None, "rows = height always fits: there are fewer blocks than pixels"
    return best[1], best[2]
