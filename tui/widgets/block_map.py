"""The block map: two pixels per cell; repaints only what changed."""

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
from appliance.tui.grid import Grid
from appliance.tui.look import SequenceKey
from appliance.tui.messages import BlockChosen, SequenceChosen
from appliance.tui.raster import (
    AGE_LIMITS,
    CURSOR,
    LETTERS,
    NONE,
    PAINT,
    ColorMode,
    letters,
    pixels,
)
from appliance.tui.state import ConnectionPhase
from appliance.tui.viewport import Viewport
from appliance.tui.widgets.lines import Lines, strip_of
from appliance.tui.widgets.panel import wrapped

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from textual.driver import Driver
    from textual.events import Click
    from textual.geometry import Size

    from appliance.tui.view import View


# Cells between changed spans that are painted as one: moving the cursor costs as much.
_MERGE_GAP = 1
_UPPER_HALF = "▀"
_COLORS = tuple(Color.parse(color) for color in PAINT)
_PAPER = Color.parse(palette.BACKGROUND)
_REVERSED = Style(reverse=True)
_INKED = 1 << 12  # flag of a letter drawn on the colour of its block


def notice(view: View) -> list[str]:
    """Return the notice's lines, the first as a heading; empty if there is a map."""
    connection, info = view.latest.connection, view.state.info
    if view.state.blocks is not None and (info is None or info.state not in ("failed", "asleep")):
        return []
    match connection.phase:
        case ConnectionPhase.CONNECTING:
            return [f"Connecting to {view.url}"]
        case ConnectionPhase.LIVE:
            return _engine(view)
        case ConnectionPhase.LOST:
            heading = f"No connection to {view.url}"
        case ConnectionPhase.NO_KEY:
            heading = f"{view.url} needs a key"
        case ConnectionPhase.UNAUTHORIZED:
            heading = f"{view.url} wants another key"
        case ConnectionPhase.ENDED:
            return ["The recording holds no block map", connection.reason]
        case ConnectionPhase.FOREIGN:
            heading = f"{view.url} is not an appliance"
    return [heading, connection.reason, "", view.retry_words]


def _engine(view: View) -> list[str]:
    info = view.state.info
    if info is None:
        return ["Connected", "waiting for the server to describe its engine"]
    match info.state:
        case "failed":
            return ["The engine failed", info.reason]
        case "asleep":
            return [f"{info.model} sleeps", "The next request wakes it; looking does not."]
        case "ready":
            return ["Connected", "waiting for the first block map"]
        case state:
            return [f"{info.model} is {state}", info.reason]


# A cell's code is letter << 16 | upper pixel << 8 | lower pixel; letter 0 is a half block.


class BlockMap(Lines):
    """Every block of the KV cache, in physical order."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._codes = np.zeros((0, 0), dtype=np.uint32)
        self._notice: list[str] = []  # lines shown instead of the picture
        self._lines: dict[int, Strip] = {}  # of the picture, filled on request
        self._glyphs: dict[int, tuple[str, Style]] = {}

    def reads(self, view: View) -> tuple[object, ...]:
        look = view.look
        # Ages advance with time, but no age step is shorter than a second.
        moment = int(view.clock / AGE_LIMITS[0]) if look.mode is ColorMode.AGE else 0
        return (
            view.state.blocks, look.mode, view.emphasis, look.level, look.cursor, view.lettered,
            moment, view.adapter_of_slot, *notice(view),
        )  # fmt: skip

    def redraw(self, view: View, terminal: Driver | None) -> None:
        """Repaint only the cells that changed, past Textual if possible."""
        words = [line for part in notice(view) for line in _lines_of(part, self.size.width)]
        before, self._codes = self._codes, self._paint(view, self.size)
        if words != self._notice or before.shape != self._codes.shape:
            self._notice = words
            self._lines.clear()
            self.refresh()
            return
        regions = [] if words else changed_regions(before, self._codes)
        for region in regions:
            self._lines.pop(region.y, None)
        if terminal is None and regions:
            self.refresh(*regions)
        elif terminal is not None and regions:
            # Textual would repaint from the widget's left edge to each span: most of the map.
            terminal.write(self._sequence(regions))

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        first = max(0, (height - len(self._notice)) // 2)
        if first <= y < first + len(self._notice):
            return self._notice_line(self._notice[y - first], bold=y == first)
        if y >= self._codes.shape[0] or self._codes.shape[1] != width:
            return Strip.blank(width, self.rich_style)
        if y not in self._lines:
            self._lines[y] = self._span(Region(0, y, width, 1))
        return self._lines[y]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Render current lines: Textual would reuse some that were painted past it."""
        lines = [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]
        return self._filtered(lines)

    def _filtered(self, strips: list[Strip]) -> list[Strip]:
        ground = self.background_colors[1]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, ground) for strip in strips]
        return strips

    def _sequence(self, regions: list[Region]) -> str:
        (left, top), console = self.content_region.offset, self.app.console
        strips = self._filtered([self._span(region) for region in regions])
        return "".join(
            f"\x1b[{top + at.y + 1};{left + at.x + 1}H{strip.render(console)}"
            for at, strip in zip(regions, strips, strict=True)
        )

    def viewport(self, view: View) -> Viewport:
        blocks, look = view.state.blocks, view.look
        return Viewport.at(
            blocks.num_blocks if blocks else 0, self.size.width, self.size.height,
            level=look.level, cursor=look.cursor, lettered=view.lettered,
        )  # fmt: skip

    def on_click(self, event: Click) -> None:
        """Post the clicked block, and the sequence that owns it."""
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

    def _span(self, region: Region) -> Strip:
        """Draw some cells of one line; equal neighbours become one segment."""
        codes = self._codes[region.y, region.x : region.right]
        starts = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
        glyphs = map(self._glyph, codes[starts].tolist())
        segments = [
            Segment(letter * (end - start), style)
            for (letter, style), start, end in zip(
                glyphs, starts, [*starts[1:], codes.size], strict=True
            )
        ]
        return Strip(segments, codes.size)

    def _paint(self, view: View, size: Size) -> NDArray[np.uint32]:
        """Return the code of each cell, (height, width)."""
        blocks, look = view.state.blocks, view.look
        if blocks is None:
            return np.full((size.height, size.width), NONE << 8 | NONE, dtype=np.uint32)
        port = self.viewport(view)
        part, grid = blocks.part(port.span), port.grid
        emphasis = view.emphasis.moved(-port.span.start)
        picture = pixels(part, grid, look.mode, emphasis, view.clock, view.adapter_of_slot)
        if port.lettered:
            drawn = letters(picture, part, grid, look.mode)
            if not view.lettered:
                # One letter per block, on the block's colour.
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
        known = self._glyphs.get(code)
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
                # Equal halves need no glyph, which could leave a seam.
                known = " ", Style.from_color(None, _COLORS[lower])
            else:
                known = _UPPER_HALF, Style.from_color(_COLORS[upper], _COLORS[lower])
            self._glyphs[code] = known
        return known

    def _notice_line(self, words: str, *, bold: bool) -> Strip:
        width = self.size.width
        line = Text(words, style=Style(color=palette.BRIGHT if bold else palette.TEXT, bold=bold))
        line.pad_left((width - line.cell_len) // 2)
        return strip_of(line, width, self.rich_style, self.app.console)


def _ink_on(color: str) -> Color:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 110
    return _PAPER if light else Color.parse(palette.TEXT)


def _lines_of(words: str, width: int) -> list[str]:
    """Wrap words to `width` cells; "" gives one empty line."""
    return [line.plain for line in wrapped(words, width, palette.TEXT)] or [""]


def changed_regions(before: NDArray[np.uint32], after: NDArray[np.uint32]) -> list[Region]:
    """Return the spans in which two pictures differ, merging near ones."""
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


class Minimap(Lines):
    DEFAULT_CSS = "Minimap { height: 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        look = view.look
        return (
            view.state.blocks, look.level, look.cursor, look.mode, view.emphasis, view.lettered,
            view.adapter_of_slot,
        )  # fmt: skip

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw the line if only part of the map is visible, else explain the zoom."""
        blocks = view.state.blocks
        if blocks is None or not blocks.num_blocks:
            return []
        port = self.screen.query_one(BlockMap).viewport(view)
        if not port.zoomed:
            words = "all blocks" if view.look.level else "all blocks; + looks closer"
            return [Text(f"{words}, arrows move the cursor", palette.NOTE)]
        grid = Grid(blocks.num_blocks, width, 1)
        drawn = pixels(blocks, grid, view.mode, view.emphasis, view.clock, view.adapter_of_slot)
        row = drawn[0].tolist()
        line = Text()
        for x, index in enumerate(row):
            under = grid.blocks_at(x, 0)
            seen = under.start < port.span.stop and under.stop > port.span.start
            if view.lettered:
                line.append(LETTERS[index], f"{PAINT[index]}{' reverse' if seen else ''}")
            else:
                line.append("▀", f"{palette.CURSOR if seen else palette.FAINT} on {PAINT[index]}")
        return [line]
