"""Abilities of the terminal: number of colours, and Unicode or only ASCII."""

from __future__ import annotations

import locale
from dataclasses import dataclass
from enum import Enum

from rich.color import ColorSystem

from appliance.errors import ConfigError
from appliance.tui.scheme import SCHEMES


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
