"""The terminal: its colours and letters, the filters that keep to them, and Textual's console.

Widgets draw in the palette's colours and in Unicode; filters replace both on output: by a theme's
colours, by sixteen or by none, and by ASCII.
"""

from __future__ import annotations

import io
import locale
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import Color, ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from rich.traceback import Traceback
from textual.filter import LineFilter

from appliance.errors import ConfigError
from appliance.tui import palette

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType
    from rich.traceback import Trace
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


class Colors(Enum):
    """Choices of `--colors`."""

    AUTO = "auto"
    TRUECOLOR = "truecolor"
    EIGHT_BIT = "256"
    STANDARD = "16"
    NONE = "none"


_SYSTEMS = {
    Colors.TRUECOLOR: ColorSystem.TRUECOLOR,
    Colors.EIGHT_BIT: ColorSystem.EIGHT_BIT,
    Colors.STANDARD: ColorSystem.STANDARD,
}


@dataclass(frozen=True, slots=True)
class DisplaySettings:
    """Colours, characters and theme to draw with.

    Attributes:
        colors: number of colours; AUTO asks the terminal's environment.
        theme: a key of `SCHEMES`.
    """

    colors: Colors = Colors.AUTO
    ascii: bool = False
    theme: str = "dark"

    @classmethod
    def of(cls, colors: str, theme: str) -> DisplaySettings:
        """Build the settings from words and the locale; raise ConfigError for unknown words."""
        try:
            chosen = Colors(colors)
        except ValueError as error:
            names = ", ".join(one.value for one in Colors)
            raise ConfigError(f"--colors {colors!r}: choose one of {names}") from error
        if theme not in SCHEMES:
            raise ConfigError(f"--theme {theme!r}: choose one of {', '.join(SCHEMES)}")
        return cls(chosen, ascii=not locale_is_utf8(), theme=theme)

    @property
    def system(self) -> ColorSystem | None:
        """Colours to send; None if the terminal's environment decides."""
        return _SYSTEMS.get(self.colors)


def locale_is_utf8() -> bool:
    """Return True if the locale is UTF-8, ignoring Python's own UTF-8 mode."""
    return locale.nl_langinfo(locale.CODESET).upper().replace("-", "") == "UTF8"


class PrivateConsole(Console):
    """Hides local values in tracebacks: they may hold a prompt or a key."""

    def __init__(self, system: ColorSystem) -> None:
        (name,) = (name for name, one in COLOR_SYSTEMS.items() if one is system)
        super().__init__(
            color_system=name,  # type: ignore[arg-type]  # one of its literals
            file=io.StringIO(), force_terminal=True, highlight=False, emoji=False, safe_box=False,
        )  # fmt: skip

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Traceback):
            _drop_locals(renderable.trace)
        return super().render(renderable, options)


def _drop_locals(trace: Trace) -> None:
    for stack in trace.stacks:
        for frame in stack.frames:
            frame.locals = None
        for one in stack.exceptions:
            _drop_locals(one)
