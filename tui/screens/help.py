"""What the keys do and what the colours mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from appliance.tui import palette

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

_KEYS = (
    ("c", "colour the map by owner, by state, by references"),
    ("↓ tab", "focus the next sequence, all others dimmed"),
    ("↑ shift+tab", "focus the previous one"),
    ("click", "on a block or a line: focus its sequence"),
    ("esc", "show all again"),
    ("p", "hold the picture still; the feed goes on"),
    ("?", "this help"),
    ("q", "quit"),
)
_COLORS = (
    (palette.FREE, "free: holds nothing"),
    (palette.CACHED, "cached: no sequence uses it, but its tokens can be used again"),
    (palette.ACTIVE, "active: in use; by owner, only if the one who took it has ended"),
    (palette.OWNER_HUES[0], "owned: in use by one sequence, a hue for each; hues repeat"),
    (palette.SHARED, "shared: used by several sequences at once"),
)


class HelpScreen(ModalScreen[None]):
    """A box over the dashboard; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,enter,q", "dismiss", "Close"),
    ]
    DEFAULT_CSS = f"""
    HelpScreen {{ align: center middle; background: {palette.BACKGROUND} 70%; }}
    HelpScreen > VerticalScroll {{
        width: 76; max-width: 100%; height: auto; max-height: 100%;
        border: round {palette.ACCENT}; background: {palette.BACKGROUND};
        border-title-style: bold; border-title-color: {palette.BRIGHT}; padding: 1 2;
    }}
    """

    def compose(self) -> ComposeResult:
        """The box."""
        with VerticalScroll() as box:
            box.border_title = "appliance top"
            yield Static(_text())


def _text() -> Text:
    lines = [
        Text.assemble((f"{key:<13}", f"bold {palette.ACCENT}"), (what, palette.TEXT))
        for key, what in _KEYS
    ]
    lines.append(Text())
    lines += [Text.assemble(("■  ", color), (what, palette.TEXT)) for color, what in _COLORS]
    lines.append(Text())
    lines.append(
        Text(
            "A cell of the map is two pixels, one above the other, in the order of memory. A pixel "
            "that stands for several blocks shows the most used of them.",
            palette.MUTED,
        )
    )
    return Text("\n").join(lines)
