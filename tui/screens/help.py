"""Explains keys and colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from appliance.tui import palette
from appliance.tui.raster import (
    ACTIVE,
    CACHED,
    FREE,
    LETTERS,
    LOADING,
    OWNER,
    PAINT,
    SHARED,
    WRITING,
)

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

_KEYS = (
    ("1 2 3 4 5", "overview, map, requests, model and memory, log"),
    ("c", "colours by owner, state, references, precision, age, adapter"),
    ("tab shift+tab", "focus the next or previous sequence, all others dimmed"),
    ("click", "on a block or a line: focus its sequence"),
    ("esc", "show all again"),
    ("p", "hold the picture still; the feed goes on"),
    ("[ ]  { }", "go back or forward by five seconds, by a minute"),
    ("x  e", "abort the request in focus; show the next replica"),
    ("map: + -", "look closer, down to one block a cell, or from farther away"),
    ("map: arrows", "move the cursor; enter focuses the owner of its block"),
    ("requests:", "s sorts, r reverses; / filters: enter keeps, esc clears"),
    ("model, log:", "arrows and page keys scroll"),
    ("ctrl+p  ?  q", "all commands, and themes; this help; quit"),
)
_COLORS = (
    (FREE, "free: holds nothing"),
    (CACHED, "cached: no sequence uses it, but its tokens can be used again"),
    (ACTIVE, "active: in use; by owner, only if the one who took it has ended"),
    (OWNER, "owned: in use by one sequence, a hue for each; hues repeat"),
    (WRITING, "being written: the open last block of a sequence, by state"),
    (LOADING, "swapped: in host memory, or on its way back from there or the disk"),
    (SHARED, "shared: used by several sequences at once"),
)


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,enter,q", "dismiss", "Close"),
    ]
    DEFAULT_CSS = f"""
    HelpScreen {{ align: center middle; background: {palette.BACKGROUND} 70%; }}
    HelpScreen > VerticalScroll {{
        width: 80; max-width: 100%; height: auto; max-height: 100%;
        border: round {palette.ACCENT}; background: {palette.BACKGROUND};
        border-title-style: bold; border-title-color: {palette.BRIGHT}; padding: 0 1;
        border-subtitle-color: {palette.MUTED};
    }}
    """

    def __init__(self, lettered: bool = False) -> None:
        super().__init__()
        self._lettered = lettered

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title, box.border_subtitle = "appliance top", "esc closes"
            yield Static(_text(self._lettered))


def _text(lettered: bool) -> Text:
    lines = [
        Text.assemble((f"{key:<15}", f"bold {palette.ACCENT}"), (what, palette.TEXT))
        for key, what in _KEYS
    ]
    lines.append(Text())
    for index, what in _COLORS:
        swatch = ("a" if index == OWNER else LETTERS[index]) if lettered else "■"
        lines.append(Text.assemble((f"{swatch}  ", PAINT[index]), (what, palette.TEXT)))
    lines.append(
        Text(
            "Two pixels a cell, in order of memory; of several blocks, the most used.",
            palette.MUTED,
        )
    )
    return Text("\n").join(lines)
