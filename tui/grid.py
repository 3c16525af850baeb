"""Maps blocks to the pixels of the block map, filling its whole area.

With more blocks than pixels, each pixel shows a bucket of neighbours; bucket sizes differ by at
most one. With fewer, each block is a tile of a grid that wastes few pixels.
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
_PLACE_BITS = 20
_MAX_PLACE = 2**_PLACE_BITS - 1  # of a block in its bucket; later blocks share the last
_STRETCH = 1.6  # largest deviation from square tiles, to leave fewer empty pixels


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_blocks` blocks on `width` x `height` pixels, in reading order."""

    num_blocks: int
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    @property
    def dense(self) -> bool:
        """True if each pixel shows at least one block."""
        return self.num_blocks >= self.num_pixels

    @property
    def blocks_per_pixel(self) -> float:
        """Mean size of a bucket; below one if blocks are tiles."""
        return self.num_blocks / self.num_pixels if self.num_pixels else 0.0

    @property
    def tile_columns(self) -> int:
        """Tiles in a row, if blocks are tiles."""
        return _tile_counts(self)[0] if self.num_blocks and self.num_pixels else 1

    def blocks_at(self, x: int, y: int) -> range:
        """Return the blocks under one pixel: none, one, or a bucket."""
        pixel = y * self.width + x
        if self.dense:
            starts = _bucket_starts(self)
            end = starts[pixel + 1] if pixel + 1 < self.num_pixels else self.num_blocks
            return range(int(starts[pixel]), int(end))
        block = int(_tiles(self)[y, x])
        return range(0) if block == NO_BLOCK else range(block, block + 1)

    def pixel_of(self, block: int) -> tuple[int, int]:
        """Return (row, column) of a block's pixel, or of its tile's corner."""
        if self.dense:
            pixel = int(np.searchsorted(_bucket_starts(self), block, side="right")) - 1
            return divmod(pixel, self.width)
        rows, columns = np.nonzero(_tiles(self) == block)
        return int(rows[0]), int(columns[0])

    def corners(self) -> NDArray[np.bool_]:
        """Return (height, width) bool: pixels where a block or its tile begins."""
        if self.dense:
            return np.ones((self.height, self.width), dtype=np.bool_)
        tiles = _tiles(self)
        first = np.ones(tiles.shape, dtype=np.bool_)
        first[1:] &= tiles[1:] != tiles[:-1]
        first[:, 1:] &= tiles[:, 1:] != tiles[:, :-1]
        first &= tiles != NO_BLOCK
        return first

    def shown(self, ranks: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the block shown at each pixel: the first of the highest rank in its bucket.

        Args:
            ranks: (num_blocks,) importance of each block, below 2**12.

        Returns:
            (height, width) block indices, or `NO_BLOCK`.
        """
        assert ranks.shape == (self.num_blocks,)
        if not self.dense or not self.num_pixels:
            return _tiles(self)
        # The low bits hold the block's place, reversed, so the maximum also finds the block.
        starts, backwards = _bucket_starts(self), _backwards(self)
        best = np.maximum.reduceat(ranks << np.uint32(_PLACE_BITS) | backwards, starts)
        blocks = starts + _MAX_PLACE - (best & np.uint32(_MAX_PLACE))
        shown: NDArray[np.int64] = blocks.reshape(self.height, self.width)
        return shown


@lru_cache(maxsize=4)
def _bucket_starts(grid: Grid) -> NDArray[np.int64]:
    """Return the first block of each bucket, (num_pixels,), strictly increasing."""
    return np.arange(grid.num_pixels, dtype=np.int64) * grid.num_blocks // grid.num_pixels


@lru_cache(maxsize=4)
def _backwards(grid: Grid) -> NDArray[np.uint32]:
    """Return `_MAX_PLACE` minus each block's place in its bucket, (num_blocks,)."""
    starts = _bucket_starts(grid)
    sizes = np.diff(starts, append=grid.num_blocks)
    places = np.arange(grid.num_blocks) - np.repeat(starts, sizes)
    backwards: NDArray[np.uint32] = (_MAX_PLACE - np.minimum(places, _MAX_PLACE)).astype(np.uint32)
    return backwards


@lru_cache(maxsize=4)
def _tiles(grid: Grid) -> NDArray[np.int64]:
    """Return the block of each pixel, (height, width), `NO_BLOCK` past the last one."""
    if not grid.num_blocks or not grid.num_pixels:
        return np.full((grid.height, grid.width), NO_BLOCK, dtype=np.int64)
    columns, rows = _tile_counts(grid)
    column = np.arange(grid.width) * columns // grid.width
    row = np.arange(grid.height) * rows // grid.height
    block = row[:, None] * columns + column
    return np.where(block < grid.num_blocks, block, NO_BLOCK)


def _tile_counts(grid: Grid) -> tuple[int, int]:
    """Choose columns and rows for nearly square tiles, few of them empty."""
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
