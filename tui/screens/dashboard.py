"""The screen of `appliance top`: lays the widgets out and holds how the person looks at them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from appliance.tui import palette
from appliance.tui.raster import ColorMode
from appliance.tui.screens.help import HelpScreen
from appliance.tui.state import DashboardState
from appliance.tui.view import SequenceKey, View
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.cache import Cache
from appliance.tui.widgets.engine import Engine
from appliance.tui.widgets.header import Header
from appliance.tui.widgets.latency import Latency
from appliance.tui.widgets.legend import Legend
from appliance.tui.widgets.lines import Lines
from appliance.tui.widgets.requests import RequestTable
from appliance.tui.widgets.status_line import StatusLine
from appliance.tui.widgets.throughput import Throughput

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.messages import SequenceChosen


class DashboardScreen(Screen[None]):
    """Block map, numbers and sequences; on a small terminal the map and two lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "app.quit", "Quit", key_display="q"),
        Binding("c", "next_mode", "Colours"),
        Binding("down,tab", "focus_sequence(1)", "Next", key_display="↓"),
        Binding("up,shift+tab", "focus_sequence(-1)", "Previous", key_display="↑"),
        Binding("escape", "show_all", "All"),
        Binding("p", "pause", "Pause"),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  (typed by Textual)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (40, "-tall")]  # noqa: RUF012
    DEFAULT_CSS = f"""
    DashboardScreen {{
        background: {palette.BACKGROUND};
        #body {{ height: 1fr; }}
        #map-panel {{
            border: round {palette.FAINT}; border-title-style: bold;
            border-title-color: {palette.TEXT}; padding: 0 1;
        }}
        BlockMap {{ height: 1fr; }}
        #numbers {{ width: 44; }}
        Throughput {{ height: 1fr; }}
        RequestTable {{ height: 12; }}
        Footer {{ background: {palette.BACKGROUND}; }}
        StatusLine {{ display: none; }}
        &.-narrow #numbers, &.-short RequestTable, &.-short Engine {{ display: none; }}
        &.-narrow StatusLine {{ display: block; }}
        &.-narrow #map-panel {{ padding: 0; }}
    }}
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._latest = DashboardState()
        self._held: DashboardState | None = None  # what a paused picture shows
        self._mode = ColorMode.OWNER
        self._focus: SequenceKey | None = None

    def compose(self) -> ComposeResult:
        """Header, map and numbers side by side, sequences, keys."""
        yield Header()
        with Horizontal(id="body"):
            with Vertical(id="map-panel"):
                yield BlockMap()
                yield Legend()
            with Vertical(id="numbers"):
                yield Throughput()
                yield Latency()
                yield Cache()
                yield Engine()
        yield RequestTable()
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Show what there is."""
        self._title_map()
        self.paint(self._latest)

    @property
    def view(self) -> View:
        """What the widgets show now."""
        return View(
            url=self._url,
            state=self._held or self._latest,
            connection_state=self._latest,
            mode=self._mode,
            focus=self._focus,
            paused=self._held is not None,
            now=time.monotonic(),
        )

    def paint(self, state: DashboardState) -> None:
        """Show another state."""
        self._latest = state
        view = self.view
        if self._focus is not None and view.focused is None:
            self._focus = None  # it ended
            view = self.view
        # Queries, as a frame may fall due before the widgets are there and after they are gone.
        for lines in self.query(Lines):
            lines.present(view)
        for block_map in self.query(BlockMap):
            block_map.present(view)

    def action_next_mode(self) -> None:
        """Let the colours mean something else."""
        self._mode = self._mode.next
        self._title_map()
        self.paint(self._latest)

    def action_pause(self) -> None:
        """Hold the picture still, or let it go on."""
        self._held = self._latest if self._held is None else None
        self.paint(self._latest)

    def action_focus_sequence(self, step: int) -> None:
        """Bring out another sequence."""
        keys = [SequenceKey.of(sequence) for sequence in self.view.state.sequences]
        if not keys:
            return
        if self._focus in keys:
            self._focus = keys[(keys.index(self._focus) + step) % len(keys)]
        else:
            self._focus = keys[0] if step > 0 else keys[-1]
        self.paint(self._latest)

    def action_show_all(self) -> None:
        """Bring out all sequences again."""
        self._focus = None
        self.paint(self._latest)

    def on_sequence_chosen(self, message: SequenceChosen) -> None:
        """Bring out what was clicked, or all again."""
        self._focus = None if message.key == self._focus else message.key
        self.paint(self._latest)

    def action_help(self) -> None:
        """Explain keys and colours."""
        self.app.push_screen(HelpScreen())

    def _title_map(self) -> None:
        title = f"KV blocks by {self._mode.value}"
        self.query_one("#map-panel").border_title = title
