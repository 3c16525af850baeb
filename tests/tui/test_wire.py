"""The bytes on the wire, read back by a small terminal."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style
from textual.drivers.linux_driver import LinuxDriver

from appliance.tui.wire import TerminalMemory, ThriftyDriver, codes, transition

WIDTH, HEIGHT = 12, 4
COLORS = ["#ff0000", "#00ff00", "#123456", "bright_red", "color(77)", "default", None]
styles = st.builds(
    Style,
    color=st.sampled_from(COLORS),
    bgcolor=st.sampled_from(COLORS),
    bold=st.sampled_from([None, True]),
    reverse=st.sampled_from([None, True]),
)
runs = st.tuples(
    st.integers(0, HEIGHT - 1),
    st.integers(0, WIDTH - 4),
    st.text("ab ▀", min_size=1, max_size=4) | st.sampled_from(["世界", "é", "a世b"]),
    styles,
)
Cell = tuple[str, frozenset[str]]


def written(y: int, x: int, text: str, style: Style) -> str:
    """A run as Textual writes it."""
    drawn = style.render(text, color_system=ColorSystem.TRUECOLOR)
    return f"\x1b[{y + 1};{x + 1}H{drawn}\n"


class SmallTerminal:
    """Cells with a letter and the codes that set its style; wide letters take two cells."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], Cell] = {}
        self.at = 0, 0

    def write(self, sequence: str) -> None:
        state: dict[str, str] = {}
        y, x = self.at
        for move_y, move_x, sgr, letter in re.findall(
            r"\x1b\[(\d+);(\d+)H|\x1b\[([\d;]*)m|([^\x1b\n])", sequence
        ):
            if letter:
                for cell in range(cell_len(letter)):
                    self.cells[y, x + cell] = letter, frozenset(state.values())
                x += cell_len(letter)
            elif move_y:
                y, x = int(move_y) - 1, int(move_x) - 1
            else:
                apply(state, sgr.split(";"))
        assert not state, "the style is reset at the end"
        self.at = y, x


def apply(state: dict[str, str], parameters: list[str]) -> None:
    while parameters:
        code = parameters.pop(0)
        if code == "0":
            state.clear()
        elif code in ("38", "48"):
            number = 4 if parameters[0] == "2" else 2
            state[code] = ";".join([code, *(parameters.pop(0) for _ in range(number))])
        elif code in ("1", "7"):
            state["attribute" + code] = code
        elif code in ("39", "49"):
            state.pop(code.replace("9", "8"), None)
        else:
            state["38" if code[0] in "39" else "48"] = code


@given(st.lists(st.lists(runs, min_size=1, max_size=5), max_size=6))
def test_a_terminal_shows_the_same_for_fewer_bytes(
    updates: list[list[tuple[int, int, str, Style]]],
) -> None:
    plain, spared, memory = SmallTerminal(), SmallTerminal(), TerminalMemory()
    for update in updates:
        sequence = "".join(written(*run) for run in update) + "\x1b[1;1H"
        plain.write(sequence)
        spared.write(memory.needed(sequence))
        assert spared.cells == plain.cells
        assert spared.at == plain.at
        if update[-1][2].isascii():
            again = written(*update[-1]) + "\x1b[1;1H"
            assert memory.needed(again) == "", "it stands there already"


def test_only_cells_that_change_are_sent() -> None:
    memory = TerminalMemory()
    blue = Style(color="#0000ff", bgcolor="#000000")
    memory.needed(written(3, 10, "a" * 40, blue) + "\x1b[1;1H")
    sent = memory.needed(written(3, 10, "a" * 20 + "b" + "a" * 19, blue) + "\x1b[1;1H")
    assert sent == "\x1b[4;31H\x1b[38;2;0;0;255;48;2;0;0;0mb\x1b[0m\x1b[1;1H"


def test_what_is_no_update_is_sent_as_it_is_and_nothing_is_relied_on_after_it() -> None:
    memory = TerminalMemory()
    update = written(0, 0, "abc", Style(bold=True))
    first = memory.needed(update)
    for other in ("\x1b[?1049h", "\x1b]0;title\x07", "\x07", "plain", "\x1b[2J"):
        assert memory.needed(update) == ""
        assert memory.needed("\x1b[?2026h") == "\x1b[?2026h"
        assert memory.needed(update) == "", "synchronization changes no cell"
        assert memory.needed(other) == other
        assert memory.needed(update) == first


def test_so_many_styles_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tui.wire.MAX_STYLES", 2)
    memory = TerminalMemory()
    for color in range(9):
        update = written(0, color, "x", Style(color=f"color({color})"))
        assert "x" in memory.needed(update)


def test_only_what_changes_of_a_style_is_said() -> None:
    red_on_blue = codes("38;2;255;0;0;48;2;0;0;255")
    green_on_blue = codes("38;2;0;255;0;48;2;0;0;255")
    assert transition(red_on_blue, green_on_blue) == "\x1b[38;2;0;255;0m"
    assert transition(red_on_blue, red_on_blue) == ""
    assert transition(red_on_blue, ("", "", "")) == "\x1b[0m"
    assert transition(codes("1;31"), codes("31")) == "\x1b[0;31m"
    assert codes("1;38;5;196;49;7") == ("1;7", "38;5;196", "")


class NoTerminal:
    """The part of an app that a driver needs."""

    terminal: ThriftyDriver | None = None


async def test_a_terminal_of_another_size_is_painted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [os.terminal_size((80, 24)), os.terminal_size((80, 24)), os.terminal_size((81, 24))]
    sent: list[str] = []
    monkeypatch.setattr(LinuxDriver, "__init__", lambda driver, app: setattr(driver, "fileno", 0))
    monkeypatch.setattr(LinuxDriver, "write", lambda driver, data: sent.append(data))
    app = NoTerminal()
    driver = ThriftyDriver(app)  # type: ignore[arg-type]
    assert app.terminal is driver
    with monkeypatch.context() as patch:  # pytest queries the size as well
        patch.setattr(os, "get_terminal_size", lambda file: sizes.pop(0))
        for _ in range(3):
            driver.write(written(0, 0, "abc", Style()))
    assert len(sent) == 2
