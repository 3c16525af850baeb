"""The screens without a map: the model with its memory, and the server's warnings and errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from appliance.tui import palette
from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.widgets.model import MemoryPanel, ModelPanel
from appliance.tui.widgets.panel import LongPanel, Panel, wrapped

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.events import LogLine
    from appliance.tui.view import View


_COLORS = {"WARNING": palette.WARNING, "ERROR": palette.BAD, "CRITICAL": palette.BAD}
_MARGIN = 18  # cells for time and level


class LogPanel(Panel):
    """The newest line at the bottom; long lines wrap."""

    TITLE = "Warnings and errors"
    DEFAULT_CSS = "LogPanel { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.log, view.look.log_back

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        log = view.state.log
        if not log:
            return [Text("No warnings or errors so far.", palette.MUTED)]
        back = min(view.look.log_back, len(log) - 1)
        lines: list[Text] = []
        for entry in reversed(log[: len(log) - back]):
            lines = [*_entry(entry, width), *lines]
            if len(lines) >= height:
                break
        return lines[-height:]


def _entry(entry: LogLine, width: int) -> list[Text]:
    when = time.strftime("%H:%M:%S", time.localtime(entry.time))
    color = _COLORS.get(entry.level, palette.TEXT)
    first, *more = wrapped(
        f"{entry.source}: {entry.message}", max(10, width - _MARGIN), palette.TEXT
    )
    mark = Text.assemble((f"{when} ", palette.MUTED), (f"{entry.level:<8} ", color))
    return [mark.append_text(first), *(Text(" " * _MARGIN).append_text(line) for line in more)]


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
