"""Replaces the palette's colours: by a theme's, by sixteen, or by none; and Unicode by ASCII.

Widgets draw in the palette's colours and in Unicode; filters replace both on output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.filter import LineFilter

from appliance.tui import palette

if TYPE_CHECKING:
    from textual.color import Color as TextualColor

_STATES = (palette.FREE, palette.CACHED, palette.ACTIVE, palette.SHARED)
_WORDS = (palette.TEXT, palette.MUTED, palette.NOTE, palette.FAINT, palette.BRIGHT)


def _with_dimmed(colors: dict[str, str], ground: str) -> dict[str, str]:
    mapping = {palette.BACKGROUND: ground, **colors}
    for color in (*_STATES, *palette.OWNER_HUES, *palette.REFERENCE_STEPS, palette.WRITING,
                  palette.SWAPPED):  # fmt: skip
        shown = mapping.get(color, color)
        mapping.setdefault(palette.dimmed(color), palette.mix(shown, ground, 0.72))
    return mapping


SCHEMES: dict[str, dict[str, str]] = {
    "dark": {},
    "black": _with_dimmed({palette.FREE: "#1c1c1c", palette.FAINT: "#4a4a4a"}, "#000000"),
    "light": _with_dimmed(
        {
            palette.FREE: "#e3e7ed", palette.CACHED: "#b3bfcf", palette.ACTIVE: "#5f7690",
            palette.SHARED: "#10141b", palette.TEXT: "#29323d", palette.MUTED: "#5b6878",
            palette.NOTE: "#7c899a", palette.FAINT: "#c3ccd8", palette.BRIGHT: "#000000",
            palette.ACCENT: "#0f6fb0", palette.GOOD: "#1a7f56", palette.WARNING: "#a96b00",
            palette.BAD: "#c8281c", palette.FOCUSED: "#dde6f2",
        },
        "#f7f9fc",
    ),
}  # fmt: skip

# The sixteen colours of every terminal; each terminal chooses their shades.
SIXTEEN = {
    palette.BACKGROUND: "black",
    palette.FREE: "black",
    palette.CACHED: "bright_black",
    palette.ACTIVE: "white",
    palette.SHARED: "bright_white",
    palette.WRITING: "bright_green",
    palette.SWAPPED: "red",
    palette.CURSOR: "bright_magenta",
    **dict(
        zip(
            palette.OWNER_HUES,
            ("bright_cyan", "yellow", "green", "magenta", "bright_yellow", "bright_red", "blue"),
            strict=True,
        )
    ),
    **dict(
        zip(
            palette.REFERENCE_STEPS,
            ("blue", "magenta", "bright_red", "bright_yellow", "bright_white"),
            strict=True,
        )
    ),
    palette.TEXT: "white",
    palette.MUTED: "white",
    palette.NOTE: "bright_black",
    palette.FAINT: "bright_black",
    palette.BRIGHT: "bright_white",
    palette.GOOD: "bright_green",
    palette.ACCENT: "bright_cyan",
    palette.WARNING: "yellow",
    palette.BAD: "bright_red",
    palette.FOCUSED: "bright_black",
    palette.PROMPT_ROWS: "cyan",
}


class Recolor(LineFilter):
    """Replaces the colours of a mapping and keeps all others.

    Args:
        mapping: from #rrggbb to any colour that Rich knows.
        dim: colour for dimmed forms of known colours that the mapping lacks.
    """

    def __init__(self, mapping: dict[str, str], *, dim: str = "") -> None:
        super().__init__()
        colors = {Color.parse(old).triplet: Color.parse(new) for old, new in mapping.items()}
        if dim:
            for old in mapping:
                triplet = Color.parse(palette.dimmed(old)).triplet
                colors.setdefault(triplet, Color.parse(dim))

        def replaced(color: Color | None) -> Color | None:
            return None if color is None else colors.get(color.triplet, color)

        @lru_cache(maxsize=4096)
        def recolored(style: Style) -> Style:
            if style.color is None and style.bgcolor is None:
                return style
            return style + Style.from_color(replaced(style.color), replaced(style.bgcolor))

        self._recolored = recolored

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:
        recolored = self._recolored
        return [
            Segment(text, None if style is None else recolored(style), control)
            for text, style, control in segments
        ]


class Colorless(LineFilter):
    """Removes colours and keeps bold, italic and underline; reverses highlighted backgrounds."""

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:
        return [
            Segment(text, None if style is None else _colorless(style), control)
            for text, style, control in segments
        ]


@lru_cache(maxsize=4096)
def _colorless(style: Style) -> Style:
    stands_out = style.bgcolor is not None and style.bgcolor.name == palette.FOCUSED
    return Style(
        bold=style.bold, italic=style.italic, underline=style.underline,
        reverse=bool(style.reverse) or stands_out,
    )  # fmt: skip


_ASCII = str.maketrans(
    {
        **dict.fromkeys("─━═▔▁▂▃", "-"),
        **dict.fromkeys("│┃║▌▐▏▕▎▊", "|"),
        **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛╔╗╚╝", "+"),
        **dict(zip("▁▂▃▄▅▆▇█", "__..::##", strict=True)),
        "●": "*", "○": "o", "■": "#", "▸": ">", "‖": "=", "…": "~", "·": "-", "↓": "v", "↑": "^",
        "←": "<", "→": ">", "▀": "'", "▼": "v", "▲": "^", "◆": "*", "°": "'",
    }
)  # fmt: skip


class OnlyAscii(LineFilter):
    """Replaces each non-ASCII character by a similar one, or by a question mark."""

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:
        return [
            Segment(text if text.isascii() else _plain(text), style, control)
            for text, style, control in segments
        ]


@lru_cache(maxsize=4096)
def _plain(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", errors="replace").decode("ascii")
