"""A bar with parts to scale, in the block map's colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import palette

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.tui.view import View


def scale_bar(
    view: View, parts: Iterable[tuple[int, str, str]], whole: int, width: int, free: str
) -> Text:
    """Draw a bar; every nonzero part gets a cell.

    Args:
        parts: (number, colour, letter for terminals without colours) of each.
        whole: the number that fills the bar.
    """
    line = Text()
    for number, color, letter in parts:
        left = width - line.cell_len
        cells = min(left, max(number > 0, round(width * number / whole)))
        line.append(letter * cells if view.lettered else " " * cells, _style(view, color))
    left = width - line.cell_len
    return line.append("." * left if view.lettered else " " * left, _style(view, free))


def shade(color: str, dims: bool) -> str:
    return palette.dimmed(color) if dims else color


def _style(view: View, color: str) -> str:
    return color if view.lettered else f"on {color}"
