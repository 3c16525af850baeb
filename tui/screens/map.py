"""The map screen: the block map with a cursor, and a sequence's block table beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from appliance.tui import palette
from appliance.tui.look import SequenceKey
from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.viewport import levels
from appliance.tui.widgets.block_map import BlockMap, Minimap
from appliance.tui.widgets.block_table import BlockTablePanel
from appliance.tui.widgets.detail import Detail
from appliance.tui.widgets.legend import Legend
from appliance.tui.widgets.strips import HostStrip, StateStrip

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.view import View


class MapScreen(DashboardScreen):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(1)", "Zoom", key_display="+ -"),
        Binding("minus", "zoom(-1)", "Farther", show=False),
        Binding("left,h", "move(-1, 0)", "Left", show=False),
        Binding("right,l", "move(1, 0)", "Right", show=False),
        Binding("up,k", "move(0, -1)", "Up", show=False),
        Binding("down,j", "move(0, 1)", "Down", show=False),
        # Not in the footer: narrow terminals have no room for all keys.
        Binding("left_square_bracket", "rewind(5)", "Back", show=False),
        Binding("enter", "focus_owner", "Focus owner", show=False),
    ]
    DEFAULT_CSS = f"""
    MapScreen {{
        #body {{ height: 1fr; }}
        #map-panel {{
            border: round {palette.FAINT}; border-title-style: bold;
            border-title-color: {palette.TEXT}; padding: 0 1;
        }}
        BlockMap {{ height: 1fr; }}
        BlockTablePanel {{ width: 44; }}
        StatusLine {{ display: none; }}
        &.-narrow BlockTablePanel {{ display: none; }}
        &.-narrow #map-panel {{ padding: 0; }}
    }}
    """

    def body(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="map-panel"):
                yield BlockMap()
                yield Minimap()
                yield HostStrip()
                yield StateStrip()
                yield Legend()
                yield Detail()
            yield BlockTablePanel()

    def framed(self, view: View) -> View:
        """Name the visible range of blocks in the title."""
        blocks, title = view.state.blocks, f"KV blocks by {view.mode.value}"
        for block_map in self.query(BlockMap):
            port = block_map.viewport(view)
            if blocks is not None and port.zoomed:
                title += f", {port.span.start:,} to {port.span.stop - 1:,}"
        self.entitle("#map-panel", title)
        return view

    def action_zoom(self, step: int) -> None:
        """Zoom in; negative steps zoom out."""
        view = self.session.view()
        blocks, size = view.state.blocks, self.query_one(BlockMap).size
        if blocks is None or not blocks.num_blocks:
            return
        most = len(levels(blocks.num_blocks, size.width, size.height, lettered=view.lettered)) - 1
        level = min(max(view.look.level + step, 0), most)
        cursor = view.look.cursor
        if cursor is None and level:
            cursor = blocks.num_blocks // 2
        self.session.change(level=level, cursor=cursor)

    def action_move(self, columns: int, rows: int) -> None:
        """Move the cursor by pixels of the map."""
        view = self.session.view()
        blocks, cursor = view.state.blocks, view.look.cursor
        if blocks is None or not blocks.num_blocks:
            return
        port = self.query_one(BlockMap).viewport(view)
        if cursor is None:
            self.session.change(cursor=port.span.start + len(port.span) // 2)
            return
        across = max(1, round(port.grid.blocks_per_pixel))
        cells = 1 if port.lettered else 2  # a line of cells is two of pixels
        moved = cursor + columns * across + rows * port.line_of_blocks() * cells
        self.session.change(cursor=min(max(moved, 0), blocks.num_blocks - 1))

    def action_focus_owner(self) -> None:
        view = self.session.view()
        blocks, cursor = view.state.blocks, view.look.cursor
        if blocks is None or cursor is None or cursor >= blocks.num_blocks:
            return
        slot = int(blocks.owners[cursor])
        keys = [SequenceKey.of(one) for one in view.state.sequences if one.slot == slot]
        self.session.change(focus=keys[0] if keys else None)

    def action_show_all(self) -> None:
        """Show all sequences; if all are shown, reset zoom and cursor."""
        if self.session.look.focus is not None:
            super().action_show_all()
        else:
            self.session.change(level=0, cursor=None)
