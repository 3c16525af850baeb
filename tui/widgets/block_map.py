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

from appliance.tui import palette
from appliance.tui.look import SequenceKey
from appliance.tui.messages import BlockChosen, SequenceChosen
from appliance.tui.notice import notice
from appliance.tui.raster import AGE_LIMITS, CURSOR, NONE, PAINT, ColorMode, letters, pixels
from appliance.tui.viewport import Viewport
from appliance.tui.widgets.lines import strip_of
from appliance.tui.wire import PaintsItself

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from textual.events import Click
    from textual.geometry import Size

    from appliance.tui.view import View

# Changed spans this close are painted as one: moving the cursor costs as much as the gap.
_MERGE_GAP = 1
_UPPER_HALF = "▀"
_COLORS = tuple(Color.parse(color) for color in PAINT)
_PAPER = Color.parse(palette.BACKGROUND)
_REVERSED = Style(reverse=True)
_INKED = 1 << 12  # of a letter: it stands on the colour of its block
# A cell is a code: letter << 16 | upper pixel << 8 | lower pixel. No letter is a half block.


class BlockMap(PaintsItself):
    """Every block of the KV cache, in physical order."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._view: View | None = None
        self._drawn_from: tuple[object, ...] | None = None
        self._cells = np.zeros((0, 0), dtype=np.uint32)
        self._notice: list[str] = []
        self._segments: dict[int, tuple[str, Style]] = {}

    def present(self, view: View) -> list[Region]:
        """Show another view; tells what changed."""
        self._view = view
        if not self.size:
            return []
        words = notice(view)
        look = view.look
        # Ages change by themselves, but no step of theirs is shorter than a second.
        moment = int(view.clock / AGE_LIMITS[0]) if look.mode is ColorMode.AGE else 0
        source = (
            view.state.blocks, look.mode, view.emphasis, look.level, look.cursor, view.lettered,
            moment, self.size, *words,
        )  # fmt: skip
        if source == self._drawn_from:
            return []
        self._drawn_from = source
        repaint_all = words != self._notice
        self._notice = words
        before, self._cells = self._cells, self._paint(view, self.size)
        if repaint_all or before.shape != self._cells.shape:
            self.refresh()
            return []
        return [] if self._notice else changed_regions(before, self._cells)

    def viewport(self, view: View) -> Viewport:
        """The window that is seen."""
        blocks, look = view.state.blocks, view.look
        return Viewport.at(
            blocks.num_blocks if blocks else 0, self.size.width, self.size.height,
            level=look.level, cursor=look.cursor, lettered=view.lettered,
        )  # fmt: skip

    def on_resize(self) -> None:
        """Draw again at the new size."""
        if self._view is not None:
            self.present(self._view)
            self.refresh()

    def on_click(self, event: Click) -> None:
        """Tell what was clicked: the block, and the sequence that owns it."""
        at = event.get_content_offset(self)
        view = self._view
        if at is None or view is None or view.state.blocks is None:
            return
        under = self.viewport(view).blocks_at(at.x, at.y)
        if not under:
            return
        owners = {int(owner) for owner in view.state.blocks.part(under).owners}
        keys = [SequenceKey.of(one) for one in view.state.sequences if one.slot in owners]
        self.post_message(BlockChosen(under.start))
        self.post_message(SequenceChosen(keys[0] if keys else None))

    def render_line(self, y: int) -> Strip:
        """One line, for the compositor."""
        width, height = self.size
        first = (height - len(self._notice)) // 2
        if self._notice and first <= y < first + len(self._notice):
            return self._notice_line(self._notice[y - first], bold=y == first)
        if y >= self._cells.shape[0] or self._cells.shape[1] != width:
            return Strip.blank(width, self.rich_style)
        return Strip(self.span(y, 0, width), width)

    def span(self, y: int, left: int, right: int) -> list[Segment]:
        """Some cells of one line."""
        cells = self._cells[y, left:right]
        starts = np.flatnonzero(cells[1:] != cells[:-1]) + 1
        ends = [*starts.tolist(), right - left]
        segments, start = [], 0
        for end in ends:
            glyph, style = self._glyph(int(cells[start]))
            segments.append(Segment(glyph * (end - start), style))
            start = end
        return segments

    def _paint(self, view: View, size: Size) -> NDArray[np.uint32]:
        """(height, width) codes of cells."""
        blocks, look = view.state.blocks, view.look
        if blocks is None:
            return np.full((size.height, size.width), NONE << 8 | NONE, dtype=np.uint32)
        port = self.viewport(view)
        part, grid = blocks.part(port.span), port.grid
        emphasis = view.emphasis.moved(-port.span.start)
        picture = pixels(part, grid, look.mode, emphasis, view.clock)
        if port.lettered:
            drawn = letters(picture, part, grid, look.mode)
            if not view.lettered:
                # On the colour of its block, once in each.
                drawn = np.where(grid.corners(), drawn, np.uint32(ord(" "))) | np.uint32(_INKED)
            codes = drawn << np.uint32(16) | picture.astype(np.uint32) * np.uint32(0x101)
        else:
            wide = picture.astype(np.uint32)
            codes = wide[0::2] << np.uint32(8) | wide[1::2]
        if look.cursor is not None and look.cursor in port.span:
            y, x = grid.pixel_of(look.cursor - port.span.start)
            y = y if port.lettered else y // 2
            codes[y, x] = codes[y, x] & np.uint32(0xFFFF0000) | np.uint32(CURSOR * 0x101)
        return codes

    def _glyph(self, code: int) -> tuple[str, Style]:
        known = self._segments.get(code)
        if known is None:
            letter, upper, lower = code >> 16, code >> 8 & 0xFF, code & 0xFF
            if letter:
                style = Style.from_color(_COLORS[upper], _PAPER)
                if letter & _INKED:
                    style = Style.from_color(_ink_on(PAINT[upper]), _COLORS[upper])
                elif upper == CURSOR:
                    style += _REVERSED
                known = chr(letter & ~_INKED), style
            elif upper == lower:
                # Equal halves need no glyph, and then no seam shows between cells.
                known = " ", Style.from_color(None, _COLORS[lower])
            else:
                known = _UPPER_HALF, Style.from_color(_COLORS[upper], _COLORS[lower])
            self._segments[code] = known
        return known

    def _notice_line(self, words: str, *, bold: bool) -> Strip:
        width = self.size.width
        line = Text(words, style=Style(color=palette.BRIGHT if bold else palette.TEXT, bold=bold))
        line.truncate(width, overflow="ellipsis")
        line.pad_left((width - line.cell_len) // 2)
        return strip_of(line, width, self.rich_style, self.app.console)


def _ink_on(color: str) -> Color:
    """Black or white, whichever can be read on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 110
    return _PAPER if light else Color.parse(palette.TEXT)


def changed_regions(before: NDArray[np.uint32], after: NDArray[np.uint32]) -> list[Region]:
    """Spans of lines in which two pictures of the same shape differ, near ones merged."""
    rows, columns = np.nonzero(before != after)
    if not rows.size:
        return []
    breaks = np.flatnonzero((np.diff(rows) != 0) | (np.diff(columns) > _MERGE_GAP + 1)) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [rows.size])) - 1
    return [
        Region(x, y, end - x + 1, 1)
        for y, x, end in zip(
            rows[firsts].tolist(), columns[firsts].tolist(), columns[lasts].tolist(), strict=True
        )
    ]
