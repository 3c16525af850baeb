"""The server's warnings and errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import palette
from appliance.tui.widgets.panel import Panel, wrapped

if TYPE_CHECKING:
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
