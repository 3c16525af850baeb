"""A bar of parts, to scale, in the block map's colours."""

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
    """Draw a bar; every nonzero part has a cell.

    Args:
        parts: number, color, and the letter for terminals without colors.
        whole: the number that is as wide as the bar.
        width: cells.
        free: color of what is left.
    """
    line = Text()
    for number, color, letter in parts:
        left = width - line.cell_len
        cells = min(left, max(number > 0, round(width * number / whole)))
        line.append(letter * cells if view.lettered else " " * cells, _style(view, color))
    left = width - line.cell_len
    return line.append("." * left if view.lettered else " " * left, _style(view, free))


def shade(color: str, dims: bool) -> str:
    """Return a color, or its dimmed twin."""
    return palette.dimmed(color) if dims else color


def _style(view: View, color: str) -> str:
    return color if view.lettered else f"on {color}"
