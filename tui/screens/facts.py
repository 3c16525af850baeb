"""The screens without a map: the model with its memory, and the server's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.widgets.log import LogPanel
from appliance.tui.widgets.model import MemoryPanel, ModelPanel
from appliance.tui.widgets.panel import LongPanel

if TYPE_CHECKING:
    from textual.app import ComposeResult


class ModelScreen(DashboardScreen):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "next_mode", "Colours", show=False),
        Binding("tab", "focus_sequence(1)", "Next", show=False),
        Binding("up,k", "scroll(-1)", "Up", key_display="↑"),
        Binding("down,j", "scroll(1)", "Down", key_display="↓"),
        Binding("pageup", "scroll(-10)", "Far up", show=False),
        Binding("pagedown", "scroll(10)", "Far down", show=False),
    ]
    DEFAULT_CSS = """
    ModelScreen {
        ModelPanel, MemoryPanel { width: 1fr; height: 1fr; }
        StatusLine { display: none; }
    }
    """

    def body(self) -> ComposeResult:
        with Horizontal():
            yield ModelPanel()
            yield MemoryPanel()

    def action_scroll(self, lines: int) -> None:
        """Scroll down; negative lines scroll up."""
        most = max(panel.hidden for panel in self.query(LongPanel))
        self.session.change(facts_down=min(max(self.session.look.facts_down + lines, 0), most))


class LogScreen(DashboardScreen):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "next_mode", "Colours", show=False),
        Binding("tab", "focus_sequence(1)", "Next", show=False),
        Binding("up,k", "scroll(1)", "Older", key_display="↑"),
        Binding("down,j", "scroll(-1)", "Newer", key_display="↓"),
        Binding("pageup", "scroll(10)", "Much older", show=False),
        Binding("pagedown", "scroll(-10)", "Much newer", show=False),
    ]
    DEFAULT_CSS = "LogScreen StatusLine { display: none; }"

    def body(self) -> ComposeResult:
        yield LogPanel()

    def action_scroll(self, lines: int) -> None:
        """Scroll back; negative lines scroll forward."""
        most = max(0, len(self.session.view().state.log) - 1)
        self.session.change(log_back=min(max(self.session.look.log_back + lines, 0), most))
