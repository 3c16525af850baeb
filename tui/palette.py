"""The dashboard's colours: states differ in luminance, owners in hue.

Owner hues are those of Okabe and Ito without black and grey. Within a mode, colours are at least 16
apart (CIE76) under each kind of colour blindness; a test simulates and measures it.
"""

from __future__ import annotations

from textual.theme import Theme

BACKGROUND = "#10141b"
FREE = "#232b38"
CACHED = "#4b586c"
ACTIVE = "#9fb4cc"
SHARED = "#ffffff"
WRITING = "#46c46b"
SWAPPED = "#783018"
CURSOR = "#ff3fae"

OWNER_HUES = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2")

# Reference counts 1, 2, 3 and 4, 5 to 8, more: each step is lighter, none equals a state.
REFERENCE_STEPS = ("#5a1fd0", "#b02fc0", "#e86a80", "#ffb050", "#fff6a8")

# Time since a block changed hands: below a second, ten seconds, a minute, ten minutes, longer.
AGE_STEPS = REFERENCE_STEPS[::-1]

TEXT = "#c8d3e0"
MUTED = "#8494a8"
NOTE = "#5d6c80"
FAINT = "#3a4657"
BRIGHT = "#ffffff"
# Slightly different from the owners' hues, so that themes can replace them separately.
ACCENT = "#58b5ea"
GOOD = "#3fb68b"
WARNING = "#e7a002"
BAD = "#ff6b5e"
FOCUSED = "#1f2a3a"  # behind the focused line
PROMPT_ROWS = "#2f6f99"
TOKENS_OUT = "#3fb68b"
TOKENS_IN = ACCENT


def _theme(
    name: str, *, dark: bool = True, background: str = BACKGROUND, text: str = TEXT
) -> Theme:
    return Theme(
        name=name,
        dark=dark,
        primary=ACCENT,
        secondary=MUTED,
        accent=ACCENT,
        foreground=text,
        background=background,
        surface=background,
        panel=background,
        success=GOOD,
        warning=WARNING,
        error=BAD,
        variables={
            "footer-background": background,
            "footer-key-foreground": ACCENT,
            "footer-description-foreground": MUTED,
        },
    )


def theme_name(name: str) -> str:
    """Return Textual's name for one of our themes."""
    return f"appliance-{name}"


# For what Textual draws, such as the command palette; `scheme` replaces our own colours.
THEMES = (
    _theme(theme_name("dark")),
    _theme(theme_name("black"), background="#000000"),
    _theme(theme_name("light"), dark=False, background="#f7f9fc", text="#29323d"),
)


def owner_hue(slot: int) -> str:
    """Return the hue of a sequence; hues repeat."""
    return OWNER_HUES[slot % len(OWNER_HUES)]


def mix(color: str, other: str, share: float) -> str:
    """Blend two #rrggbb colours; `share`, 0 to 1, is the part of `other`."""
    pairs = ((int(color[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def dimmed(color: str) -> str:
    """Fade a colour into the background."""
    return mix(color, BACKGROUND, 0.72)
