"""The visible part of the block map: from all of it down to one block per cell."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.tui.grid import Grid

_STEP = 4  # factor between zoom levels in blocks per pixel


@dataclass(frozen=True, slots=True)
class Viewport:
    """A window on `num_blocks` blocks, drawn on `columns` x `rows` cells.

    Attributes:
        lettered: each cell is one pixel with a letter instead of two pixels.
        level: 0 shows all blocks; the last level is lettered.
    """

    num_blocks: int
    columns: int
    rows: int
    span: range
    lettered: bool
    level: int

    @classmethod
    def at(
        cls, num_blocks: int, columns: int, rows: int, *, level: int, cursor: int | None,
        lettered: bool = False,
    ) -> Viewport:  # fmt: skip
        """Place the window around the cursor.

        Args:
            level: index into `levels`, limited to the last.
            cursor: block to keep visible; None for the first.
            lettered: draw letters at every level, for terminals without half blocks or colours.
        """
        counts = levels(num_blocks, columns, rows, lettered=lettered)
        level = min(level, len(counts) - 1)
        count = counts[level]
        draw_letters = lettered or (level > 0 and level == len(counts) - 1)
        # The window moves by quarters, so most cursor steps repaint only two cells.
        quarter = max(1, count // 4)
        first = ((cursor or 0) - count // 2 + quarter // 2) // quarter * quarter
        first = min(max(first, 0), num_blocks - count)
        return cls(num_blocks, columns, rows, range(first, first + count), draw_letters, level)

    @property
    def grid(self) -> Grid:
        """Grid of the visible blocks, counted from the first."""
        return Grid(len(self.span), self.columns, self.rows * (1 if self.lettered else 2))

    @property
    def zoomed(self) -> bool:
        """True if only part of the blocks is visible."""
        return len(self.span) < self.num_blocks

    def blocks_at(self, x: int, y: int) -> range:
        grid = self.grid
        if not self.columns or not self.rows or not self.span:
            return range(0)
        if self.lettered:
            under = [grid.blocks_at(x, y)]
        else:
            under = [grid.blocks_at(x, 2 * y), grid.blocks_at(x, 2 * y + 1)]
        held = [blocks for blocks in under if blocks]
        if not held:
            return range(0)
        # The halves of a cell are a line of pixels apart: the upper one counts.
        first = held[0]
        return range(self.span.start + first.start, self.span.start + first.stop)

    def line_of_blocks(self) -> int:
        """Return the distance in blocks from a pixel to the one below."""
        grid = self.grid
        if grid.dense:
            return max(1, round(grid.blocks_per_pixel * self.columns))
        return grid.tile_columns


def levels(num_blocks: int, columns: int, rows: int, *, lettered: bool = False) -> list[int]:
    """Return the number of visible blocks per zoom level, from all to one per cell."""
    cells = columns * rows
    finest = 1 if lettered else 2  # pixels a cell
    counts = [num_blocks]
    while counts[-1] > finest * cells > 0:
        counts.append(max(counts[-1] // _STEP, finest * cells))
    if not lettered and cells:
        counts.append(min(num_blocks, cells))
    return counts
