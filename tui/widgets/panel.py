"""A bordered panel of aligned lines: names on the left, numbers on the right."""

from __future__ import annotations

from rich.text import Text

from appliance.tui import palette
from appliance.tui.widgets.lines import Lines

HEADLINE = f"bold {palette.BRIGHT}"  # style of a panel's main number


class Panel(Lines):
    """Base of the panels with numbers."""

    TITLE = ""
    DEFAULT_CSS = f"""
    Panel {{
        border: round {palette.FAINT};
        border-title-color: {palette.TEXT};
        border-title-style: bold;
        padding: 0 1;
    }}
    """

    def on_mount(self) -> None:
        """Put the title into the border."""
        self.border_title = self.TITLE


def pair(name: str, value: str, width: int, *, note: str = "", color: str = palette.TEXT) -> Text:
    """A name, a muted note, and a value that ends at the right edge."""
    line = Text(name, palette.MUTED)
    if note:
        line.append(f"  {note}", palette.NOTE)
    line.truncate(max(0, width - len(value) - 1), overflow="ellipsis", pad=True)
    return line.append(" ").append(value, color)
