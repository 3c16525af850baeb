"""Terminals with fewer colours, with none, without UTF-8, and other themes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.color import Color, ColorSystem
from rich.segment import Segment
from rich.style import Style

from appliance.errors import ConfigError
from appliance.tui import palette
from appliance.tui.raster import PAINT
from appliance.tui.terminal import (
    SCHEMES,
    SIXTEEN,
    Colorless,
    Colors,
    DisplaySettings,
    OnlyAscii,
    Recolor,
)
from tests.tui.piloting import LARGE, SMALL, dashboard, screen_strips, screen_text, shown, until

if TYPE_CHECKING:
    from textual.strip import Strip

    from tests.tui.conftest import EventServer


def colors_of(strips: list[Strip]) -> set[Color]:
    styles = [segment.style for strip in strips for segment in strip if segment.style]
    return {color for style in styles for color in (style.color, style.bgcolor) if color}


async def test_sixteen_colours_are_chosen_by_hand(event_server: EventServer) -> None:
    async with dashboard(event_server, display=DisplaySettings(Colors.STANDARD)) as (app, pilot):
        await shown(app, pilot)
        assert app.depth is ColorSystem.STANDARD
        names = {color.name for color in colors_of(screen_strips(app))}
    assert {SIXTEEN[color] for color in (palette.FREE, palette.CACHED, palette.SHARED)} <= names
    assert {SIXTEEN[palette.owner_hue(slot)] for slot in (1, 2)} <= names
    assert not {name for name in names if name.startswith("#")} & set(PAINT)


def test_states_and_owners_stay_apart_in_sixteen_colours() -> None:
    states = [palette.FREE, palette.CACHED, palette.ACTIVE, palette.SHARED, palette.WRITING]
    for colors in (states, [*palette.OWNER_HUES, palette.SHARED], list(palette.AGE_STEPS)):
        assert len({SIXTEEN[color] for color in colors}) == len(colors)


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_without_colours_letters_tell_states_and_owners(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size, display=DisplaySettings(Colors.NONE)) as (app, pilot):
        await shown(app, pilot)
        strips = screen_strips(app)
        text = "\n".join(strip.text for strip in strips)
        assert not colors_of(strips)
        for letters in ("*" * 30, "b" * 30, "c" * 30, ":" * 30, "." * 30):
            assert letters in text
        assert ". free 2,048" in text
        if size == LARGE:
            for name in ("b chatcmpl-1", "c chatcmpl-2"):
                assert name in text, "the letters on the map"
        await pilot.press("tab")
        await shown(app, pilot)
        text = "\n".join(strip.text for strip in screen_strips(app))
        assert "b" * 30 in text
        assert "-" * 30 in text, "the others"
        assert "c" * 30 not in text


async def test_without_utf8_nothing_but_ascii_is_sent(event_server: EventServer) -> None:
    display = DisplaySettings(Colors.STANDARD, ascii=True)
    async with dashboard(event_server, display=display) as (app, pilot):
        for page in "12345":
            await pilot.press(page, "tab", "plus")
            await shown(app, pilot)
            text = "".join(strip.text for strip in screen_strips(app))
            assert text.isascii(), page
            assert "?" not in text.replace("? Help", ""), page


async def test_the_environment_can_forbid_colours(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with dashboard(event_server) as (app, pilot):
        await shown(app, pilot)
        assert app.depth is None
        assert not colors_of(screen_strips(app))


async def test_themes_change_every_colour_and_back(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        dark = colors_of(screen_strips(app))
        app.use_theme("light")
        await shown(app, pilot)
        light = colors_of(screen_strips(app))
        assert Color.parse(palette.BACKGROUND) not in light
        assert Color.parse(SCHEMES["light"][palette.BACKGROUND]) in light
        app.use_theme("dark")
        await shown(app, pilot)
        await pilot.pause(0.3)  # lets Textual style its own widgets
        await shown(app, pilot)
        assert colors_of(screen_strips(app)) == dark


def test_no_colour_of_words_is_one_of_blocks() -> None:
    words = {
        palette.TEXT, palette.MUTED, palette.NOTE, palette.FAINT, palette.ACCENT, palette.GOOD,
        palette.WARNING, palette.BAD, palette.TOKENS_IN, palette.TOKENS_OUT, palette.FOCUSED,
    }  # fmt: skip
    assert words.isdisjoint(PAINT)


async def test_a_terminal_with_few_colours_has_no_themes(event_server: EventServer) -> None:
    async with dashboard(event_server, display=DisplaySettings(Colors.STANDARD)) as (app, pilot):
        app.use_theme("light")
        await until(pilot, lambda: "too few colours for themes" in screen_text(app))


@pytest.mark.parametrize("theme", SCHEMES)
def test_dimmed_colours_follow_their_theme(theme: str) -> None:
    recolor = Recolor(SCHEMES[theme])
    style = Style(color=palette.dimmed(palette.owner_hue(0)))
    (segment,) = recolor.apply([Segment("x", style)], None)  # type: ignore[arg-type]
    assert segment.style is not None
    changed = segment.style.color != style.color
    assert changed is (palette.BACKGROUND in SCHEMES[theme])


def test_what_is_in_focus_is_reversed_without_colours() -> None:
    focused = Segment("x", Style(bgcolor=palette.FOCUSED, color=palette.TEXT, bold=True))
    (plain,) = Colorless().apply([focused], None)  # type: ignore[arg-type]
    assert plain.style == Style(bold=True, reverse=True, italic=None, underline=None)


def test_every_letter_of_ours_has_one_in_ascii() -> None:
    (segment,) = OnlyAscii().apply([Segment("╭─╮│▁█●○■▸━‖…·↓▀▼◆°╰╯")], None)  # type: ignore[arg-type]
    assert segment.text.isascii()
    assert "?" not in segment.text


@pytest.mark.parametrize(("colors", "theme"), [("many", "dark"), ("16", "pink")])
def test_unknown_names_are_refused_with_the_known_ones(colors: str, theme: str) -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        DisplaySettings.of(colors, theme)
