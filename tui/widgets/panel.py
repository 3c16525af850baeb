"""A bordered panel of aligned lines: names on the left, numbers on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import get_console
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from appliance.tui import palette
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.view import View

HEADLINE = f"bold {palette.BRIGHT}"  # style of a panel's main number


class Panel(Lines):
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
        self.border_title = self.TITLE


class LongPanel(Panel):
    """Base of panels that scroll; subclasses supply all lines.

    Attributes:
        hidden: number of lines that do not fit.
    """

    hidden = 0

    def all_lines(self, view: View, width: int) -> list[Text]:
        raise NotImplementedError

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw the lines that fit, from the scroll position on."""
        lines = self.all_lines(view, width)
        self.hidden = max(0, len(lines) - height)
        start = min(view.look.facts_down, self.hidden)
        below = self.hidden - start
        words = f"{below} more ↓" if below else "↑" if self.hidden else ""
        if self.border_subtitle != words:
            self.border_subtitle = words  # each change repaints the whole panel
        return lines[start:]


def pair(name: str, value: str, width: int, *, note: str = "", color: str = palette.TEXT) -> Text:
    """Draw a name, a muted note if it fits, and a value at the right edge.

    A long value is cut at its end, but keeps at least half of the line.
    """
    value = shortened(value, max(width - cell_len(name) - 1, width // 2))
    room = max(0, width - cell_len(value) - 1)
    line = Text(name, palette.MUTED)
    if note and line.cell_len + 2 + cell_len(note) <= room:
        line.append(f"  {note}", palette.NOTE)
    line.truncate(room, overflow="ellipsis", pad=True)
    return line.append(" ").append(value, color)


def shortened(words: str, room: int) -> str:
    """Cut words to `room` cells, with an ellipsis at the end."""
    return words if cell_len(words) <= room else f"{set_cell_size(words, max(0, room - 1))}…"


def wrapped(words: str, width: int, color: str) -> list[Text]:
    """Wrap words into lines of at most `width` cells, breaking long words."""
    text = Text(" ".join(words.split()), color)
    lines = text.wrap(get_console(), max(1, width))
    for line in lines:
        line.rstrip()
    return list(lines)
