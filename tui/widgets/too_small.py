"""The notice in a terminal too small for the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import palette
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.view import View


class TooSmall(Lines):
    DEFAULT_CSS = "TooSmall { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return ()

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        words = ["Terminal too small:", f"{width}x{height}.", "40x10 is the least.", "q quits."]
        return [Text(line[:width], palette.TEXT) for line in words]
