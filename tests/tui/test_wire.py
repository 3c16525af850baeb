"""What goes over the wire, read back by a small terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from appliance.tui.wire import Painted, codes, transition

COLORS = ["#ff0000", "#00ff00", "#123456", "bright_red", None]
styles = st.builds(
    Style,
    color=st.sampled_from(COLORS),
    bgcolor=st.sampled_from(COLORS),
    bold=st.sampled_from([None, True]),
    reverse=st.sampled_from([None, True]),
)
segments = st.builds(Segment, st.text("ab▀", min_size=1, max_size=4), st.none() | styles)


def truecolor_console() -> Console:
    return Console(color_system="truecolor", force_terminal=True, width=80)


def screen_of(sequence: str) -> dict[tuple[int, int], tuple[str, frozenset[str]]]:
    """What a terminal shows after some sequences: a letter and its codes for each cell."""
    cells: dict[tuple[int, int], tuple[str, frozenset[str]]] = {}
    y = x = 0
    state: dict[str, str] = {}
    for move_y, move_x, sgr, letter in re.findall(
        r"\x1b\[(\d+);(\d+)H|\x1b\[([\d;]*)m|(.)", sequence
    ):
        if letter:
            cells[y, x] = letter, frozenset(state.values())
            x += 1
        elif move_y:
            y, x = int(move_y) - 1, int(move_x) - 1
        else:
            apply(state, sgr.split(";"))
    assert not state, "the style is reset at the end"
    return cells


def apply(state: dict[str, str], parameters: list[str]) -> None:
    while parameters:
        code = parameters.pop(0)
        if code == "0":
            state.clear()
        elif code in ("38", "48"):
            state[code] = ";".join([code, *(parameters.pop(0) for _ in range(4))])
        elif code in ("1", "7"):
            state["attribute" + code] = code
        else:
            state["38" if code[0] in "39" else "48"] = code


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.lists(segments)), max_size=6))
def test_a_terminal_shows_what_was_painted(spans: list[tuple[int, int, list[Segment]]]) -> None:
    console = truecolor_console()
    wanted = {}
    for y, left, content in spans:
        x = left
        for text, style, _ in content:
            parts = codes(style, ColorSystem.TRUECOLOR) if style else ("", "", "")
            single = {part for code in parts[:1] for part in code.split(";")} | set(parts[1:])
            for letter in text:
                wanted[y, x] = letter, frozenset(single - {""})
                x += 1
    assert screen_of(Painted(spans).render_segments(console)) == wanted


def test_only_what_changes_is_said() -> None:
    red_on_blue = codes(Style(color="#ff0000", bgcolor="#0000ff"), ColorSystem.TRUECOLOR)
    green_on_blue = codes(Style(color="#00ff00", bgcolor="#0000ff"), ColorSystem.TRUECOLOR)
    assert transition(red_on_blue, green_on_blue) == "\x1b[38;2;0;255;0m"
    assert transition(red_on_blue, red_on_blue) == ""
    assert transition(red_on_blue, ("", "", "")) == "\x1b[0m"


@pytest.mark.parametrize(
    ("system", "wanted"),
    [(ColorSystem.TRUECOLOR, "38;2;255;0;0"), (ColorSystem.EIGHT_BIT, "38;5;196")],
)
def test_colours_are_those_of_the_terminal(system: ColorSystem, wanted: str) -> None:
    assert codes(Style(color="#ff0000"), system)[1] == wanted
