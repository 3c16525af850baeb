"""The page of the block map: a cursor on it, and the block table of a sequence beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from appliance.tui import palette
from appliance.tui.screens.page import Page
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.block_table import BlockTablePanel
from appliance.tui.widgets.detail import Detail
from appliance.tui.widgets.host_strip import HostStrip
from appliance.tui.widgets.legend import Legend
from appliance.tui.widgets.minimap import Minimap

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.view import View


class MapPage(Page):
    """Looks at single blocks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "app.zoom(1)", "Zoom", key_display="+ -"),
        Binding("minus", "app.zoom(-1)", "Farther", show=False),
        Binding("left,h", "app.move(-1, 0)", "Left", show=False),
        Binding("right,l", "app.move(1, 0)", "Right", show=False),
        Binding("up,k", "app.move(0, -1)", "Up", show=False),
        Binding("down,j", "app.move(0, 1)", "Down", show=False),
        Binding("enter", "app.focus_owner", "Focus owner", show=False),
    ]
    DEFAULT_CSS = f"""
    MapPage {{
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
        """The map with its lines, and the block table."""
        with Horizontal(id="body"):
            with Vertical(id="map-panel"):
                yield BlockMap()
                yield Minimap()
                yield HostStrip()
                yield Legend()
                yield Detail()
            yield BlockTablePanel()

    def paint(self, view: View, *, panels: bool = True) -> None:
        """Show another view."""
        blocks = view.state.blocks
        for block_map in self.query(BlockMap):
            title = f"KV blocks by {view.mode.value}"
            port = block_map.viewport(view)
            if blocks is not None and port.zoomed:
                title += f", {port.span.start:,} to {port.span.stop - 1:,}"
            self.entitle("#map-panel", title)
        super().paint(view, panels=panels)
