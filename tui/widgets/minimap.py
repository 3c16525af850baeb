"""One line of all blocks, which marks the part that the block map shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import palette
from appliance.tui.grid import Grid
from appliance.tui.raster import LETTERS, PAINT, pixels
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.view import View


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
