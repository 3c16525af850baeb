"""The overview screen: block map, numbers and sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from appliance.tui import palette
from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.legend import Legend
from appliance.tui.widgets.machine import MachinePanel
from appliance.tui.widgets.overview_panels import (
    CachePanel,
    EnginePanel,
    Latency,
    Throughput,
    Trends,
)
from appliance.tui.widgets.requests import RequestTable
from appliance.tui.widgets.strips import HostStrip, StateStrip

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.view import View


class OverviewScreen(DashboardScreen):
    """Shows everything at a glance; a small terminal has only the map and two lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "focus_sequence(1)", "Next", show=False),
        Binding("up", "focus_sequence(-1)", "Previous", show=False),
    ]
    DEFAULT_CSS = f"""
    OverviewScreen {{
        #body {{ height: 1fr; }}
        #map-panel {{
            border: round {palette.FAINT}; border-title-style: bold;
            border-title-color: {palette.TEXT}; padding: 0 1;
        }}
        BlockMap {{ height: 1fr; }}
        #numbers {{ width: 44; }}
        Trends {{ width: 44; display: none; }}
        Throughput {{ height: 1fr; min-height: 6; }}
        RequestTable {{ height: 10; }}
        StatusLine {{ display: none; }}
        &.-low RequestTable, &.-short RequestTable {{ display: none; }}
        &.-short EnginePanel, &.-middle EnginePanel {{ display: none; }}
        &.-short MachinePanel, &.-middle MachinePanel, &.-tall MachinePanel {{ display: none; }}
        &.-short Throughput {{ min-height: 4; }}
        &.-narrow #numbers, &.-low #numbers {{ display: none; }}
        &.-narrow StatusLine, &.-low StatusLine {{ display: block; }}
        &.-narrow #map-panel {{ padding: 0; }}
        &.-narrow HostStrip, &.-low HostStrip {{ display: none; }}
        &.-narrow StateStrip, &.-low StateStrip {{ display: none; }}
        &.-huge Trends {{ display: block; }}
        &.-high RequestTable {{ height: 16; }}
    }}
    """

    def body(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="map-panel"):
                yield BlockMap()
                yield HostStrip()
                yield StateStrip()
                yield Legend()
            yield Trends()
            with Vertical(id="numbers"):
                yield Throughput()
                yield Latency()
                yield CachePanel()
                yield EnginePanel()
                yield MachinePanel()
        yield RequestTable()

    def framed(self, view: View) -> View:
        self.entitle("#map-panel", f"KV blocks by {view.mode.value}")
        return view.whole()
