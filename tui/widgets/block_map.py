"""The physical block map: two pixels in each cell, and only what changed is painted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from appliance.tui import palette
from appliance.tui.grid import Grid
from appliance.tui.messages import SequenceChosen
from appliance.tui.notice import notice
from appliance.tui.raster import NONE, PAINT, pixels
from appliance.tui.view import SequenceKey
from appliance.tui.widgets.lines import strip_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from textual.events import Click
    from textual.geometry import Size

    from appliance.tui.view import View

# Changed spans this close are painted as one: moving the cursor costs as much as the gap.
_MERGE_GAP = 12
_UPPER_HALF = "▀"
_COLORS = tuple(Color.parse(color) for color in PAINT)


class BlockMap(Widget):
    """Every block of the KV cache, in physical order."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._view: View | None = None
        self._drawn_from: tuple[object, ...] | None = None
        self._cells = np.zeros((0, 0), dtype=np.uint16)  # upper pixel * 256 + lower pixel
        self._notice: list[str] = []
        self._styles: dict[int, Style] = {}

    def present(self, view: View) -> None:
        """Show another view."""
        self._view = view
        if not self.size:
            return
        words = notice(view)
        blocks = view.state.blocks
        current = view.connection_state.current
        source = (blocks, view.mode, view.focus_slot, current, self.size, *words)
        if source == self._drawn_from:
            return
        self._drawn_from = source
        repaint_all = words != self._notice
        self._notice = words
        before, self._cells = self._cells, self._paint(view, self.size)
        if repaint_all or before.shape != self._cells.shape:
            self.refresh()
            return
        regions = changed_regions(before, self._cells)
        if regions:
            self.refresh(*regions)

    def on_resize(self) -> None:
        """Draw again at the new size."""
        if self._view is not None:
            self.present(self._view)

    def on_click(self, event: Click) -> None:
        """Tell which sequence owns what was clicked."""
        at = event.get_content_offset(self)
        state = None if self._view is None else self._view.state
        if at is None or state is None or state.blocks is None:
            return
        blocks = state.blocks
        grid = Grid(blocks.num_blocks, self.size.width, 2 * self.size.height)
        under = [*grid.blocks_at(at.x, 2 * at.y), *grid.blocks_at(at.x, 2 * at.y + 1)]
        owners = {int(blocks.owners[block]) for block in under}
        keys = [SequenceKey.of(one) for one in state.sequences if one.slot in owners]
        self.post_message(SequenceChosen(keys[0] if keys else None))

    def render_line(self, y: int) -> Strip:
        """One line, for the compositor."""
        width, height = self.size
        first = (height - len(self._notice)) // 2
        if self._notice and first <= y < first + len(self._notice):
            return self._notice_line(self._notice[y - first], bold=y == first)
        if y >= self._cells.shape[0] or self._cells.shape[1] != width:
            return Strip.blank(width, self.rich_style)
        cells = self._cells[y]
        starts = np.flatnonzero(np.diff(cells, prepend=cells[0] ^ 1))
        lengths = np.diff(starts, append=width)
        return Strip(
            [
                self._segment(code, length)
                for code, length in zip(cells[starts].tolist(), lengths.tolist(), strict=True)
            ],
            width,
        )

    def _paint(self, view: View, size: Size) -> NDArray[np.uint16]:
        """(height, width) of pairs of colours."""
        blocks = view.state.blocks
        if blocks is None:
            return np.full((size.height, size.width), NONE << 8 | NONE, dtype=np.uint16)
        picture = pixels(
            blocks,
            Grid(blocks.num_blocks, size.width, 2 * size.height),
            view.mode,
            focus=view.focus_slot,
            stale=not view.connection_state.current,
        ).astype(np.uint16)
        return picture[0::2] << np.uint16(8) | picture[1::2]

    def _segment(self, code: int, length: int) -> Segment:
        upper, lower = code >> 8, code & 0xFF
        style = self._styles.get(code)
        if style is None:
            # Equal halves need no glyph, and then no seam shows between cells.
            color = None if upper == lower else _COLORS[upper]
            style = self._styles[code] = Style.from_color(color, _COLORS[lower])
        return Segment((" " if upper == lower else _UPPER_HALF) * length, style)

    def _notice_line(self, words: str, *, bold: bool) -> Strip:
        width = self.size.width
        line = Text(words, style=Style(color=palette.BRIGHT if bold else palette.TEXT, bold=bold))
        line.truncate(width, overflow="ellipsis")
        line.pad_left((width - line.cell_len) // 2)
        return strip_of(line, width, self.rich_style, self.app.console)


def changed_regions(before: NDArray[np.uint16], after: NDArray[np.uint16]) -> list[Region]:
    """Spans of lines in which two pictures of the same shape differ, near ones merged."""
    rows, columns = np.nonzero(before != after)
    if not rows.size:
        return []
    breaks = np.flatnonzero((np.diff(rows) != 0) | (np.diff(columns) > _MERGE_GAP)) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [rows.size])) - 1
    return [
        Region(x, y, end - x + 1, 1)
        for y, x, end in zip(
            rows[firsts].tolist(), columns[firsts].tolist(), columns[lasts].tolist(), strict=True
        )
    ]
