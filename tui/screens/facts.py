"""The pages without a map: what is loaded and where memory went, and the server's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from appliance.tui.screens.page import Page
from appliance.tui.widgets.log import LogPanel
from appliance.tui.widgets.model import MemoryPanel, ModelPanel

if TYPE_CHECKING:
    from textual.app import ComposeResult


class ModelPage(Page):
    """What is loaded, and its memory."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "app.scroll_facts(-1)", "Up", show=False),
        Binding("down,j", "app.scroll_facts(1)", "Down", show=False),
        Binding("pageup", "app.scroll_facts(-10)", "Far up", show=False),
        Binding("pagedown", "app.scroll_facts(10)", "Far down", show=False),
    ]
    DEFAULT_CSS = """
    ModelPage {
        ModelPanel, MemoryPanel { width: 1fr; height: 1fr; }
        StatusLine { display: none; }
    }
    """

    def body(self) -> ComposeResult:
        """Two panels side by side."""
        with Horizontal():
            yield ModelPanel()
            yield MemoryPanel()


class LogPage(Page):
    """Warnings and errors."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "app.scroll_log(1)", "Older", key_display="↑"),
        Binding("down,j", "app.scroll_log(-1)", "Newer", key_display="↓"),
        Binding("pageup", "app.scroll_log(10)", "Much older", show=False),
        Binding("pagedown", "app.scroll_log(-10)", "Much newer", show=False),
    ]
    DEFAULT_CSS = "LogPage StatusLine { display: none; }"

    def body(self) -> ComposeResult:
        """One panel."""
        yield LogPanel()
