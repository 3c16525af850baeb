"""Sends a terminal only the cells that change, to save bytes over SSH.

Textual repaints whole regions and names both colours for every run of cells. This driver remembers
the terminal's content, skips what is already there, and sends only differences between styles.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.tui.app import DashboardApp

Codes = tuple[str, str, str]  # attributes, colour, background; "" is the terminal's default
_PLAIN: Codes = ("", "", "")
_RESET = "\x1b[0m"
# A screen update is a series of these: a style or a cursor position, then text.
_PIECE = re.compile(r"\x1b\[([\d;]*)([mH])([^\x1b]*)")
_ONE_CELL_EACH = re.compile(r"[ -~·°─-▟■●○◆▸▲▼‖…←-↓]*")
_SYNCHRONIZED = ("\x1b[?2026h", "\x1b[?2026l")  # around each update; they change no cell
_UNKNOWN = "\0"
_NEAR = 4  # cells to send again rather than move the cursor over them
MAX_STYLES = 50_000


class TerminalMemory:
    """A terminal's content, as far as the bytes written to it tell."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[str, str]] = {}  # letters, and the style of each
        self._styles: dict[str, str] = {}
        self._cursor: tuple[int, int] | None = None

    def forget(self) -> None:
        self._rows.clear()
        self._styles.clear()
        self._cursor = None

    def needed(self, written: str) -> str:
        """Return the shortest equivalent of an update; anything else is returned unchanged."""
        if written in _SYNCHRONIZED:
            return written
        pieces = _PIECE.findall(written)
        if not written.startswith("\x1b[") or written.count("\x1b") != len(pieces):
            self.forget()
            return written
        if len(self._styles) > MAX_STYLES:
            self.forget()
        pen = _Pen(self._cursor)
        y = x = 0
        parameters = ""
        for told, kind, text in pieces:
            if kind == "m":
                parameters = "" if told in ("", "0") else told
            else:
                row, _, column = told.partition(";")
                y, x = int(row or 1) - 1, int(column or 1) - 1
            if text := text.replace("\n", ""):  # a position always follows the end of a line
                x = self._write(pen, y, x, text, parameters)
        self._cursor = y, x
        return pen.finish(y, x, codes(parameters))

    def _write(self, pen: _Pen, y: int, x: int, text: str, parameters: str) -> int:
        """Send the cells of a run that differ; return the column after the run."""
        if _ONE_CELL_EACH.fullmatch(text) is None:
            # Terminals disagree on this text's width: always send it, never rely on it.
            pen.draw(y, x, text, codes(parameters))
            pen.cursor = None
            end = x + cell_len(text)
            self._store(y, x, _UNKNOWN * (end - x), _UNKNOWN)
            return end
        end = x + len(text)
        mark = self._mark(parameters)
        letters, styles = self._row(y, end)
        before, styled = letters[x:end], styles[x:end]
        if before == text and styled == mark * len(text):
            return end
        for first, last in _changed(before, text, styled, mark):
            pen.draw(y, x + first, text[first:last], codes(parameters))
        self._store(y, x, text, mark)
        return end

    def _mark(self, parameters: str) -> str:
        mark = self._styles.get(parameters)
        if mark is None:
            mark = self._styles[parameters] = chr(1 + len(self._styles))
        return mark

    def _row(self, y: int, width: int) -> tuple[str, str]:
        letters, styles = self._rows.get(y, ("", ""))
        if len(letters) < width:
            letters, styles = letters.ljust(width, _UNKNOWN), styles.ljust(width, _UNKNOWN)
        return letters, styles

    def _store(self, y: int, x: int, text: str, mark: str) -> None:
        end = x + len(text)
        letters, styles = self._row(y, end)
        styles = f"{styles[:x]}{mark * len(text)}{styles[end:]}"
        self._rows[y] = f"{letters[:x]}{text}{letters[end:]}", styles


def _changed(before: str, text: str, styled: str, mark: str) -> Iterator[tuple[int, int]]:
    """Yield (first cell, end) of each part that differs, joining near ones."""
    first = last = -_NEAR - 1
    for at, (old, new, style) in enumerate(zip(before, text, styled, strict=True)):
        if old == new and style == mark:
            continue
        if at - last > _NEAR:
            if last >= 0:
                yield first, last
            first = at
        last = at + 1
    yield first, last


class _Pen:
    """Builds an update, tracking the terminal's cursor and style."""

    def __init__(self, cursor: tuple[int, int] | None) -> None:
        self.cursor = cursor
        self._out: list[str] = []
        self._codes = _PLAIN

    def draw(self, y: int, x: int, text: str, style: Codes) -> None:
        self._move(y, x)
        if style != self._codes:
            self._out.append(transition(self._codes, style))
            self._codes = style
        self._out.append(text)
        self.cursor = y, x + len(text)

    def finish(self, y: int, x: int, style: Codes) -> str:
        """Return the update, which ends with this cursor and style."""
        self._out.append(transition(self._codes, style))
        self._move(y, x)
        return "".join(self._out)

    def _move(self, y: int, x: int) -> None:
        if self.cursor != (y, x):
            self._out.append(f"\x1b[{y + 1};{x + 1}H")


@lru_cache(maxsize=4096)
def codes(parameters: str) -> Codes:
    """Split a style's escape parameters into attributes, colour and background."""
    attributes, color, ground = [], "", ""
    left = [one for one in parameters.split(";") if one]
    while left:
        number = int(left[0])
        size = {"2": 5, "5": 3}.get("".join(left[1:2]), 1) if number in (38, 48) else 1
        told, left = ";".join(left[:size]), left[size:]
        if number in (38, *range(30, 38), *range(90, 98)):
            color = told
        elif number in (48, *range(40, 48), *range(100, 108)):
            ground = told
        elif number not in (39, 49):
            attributes.append(told)
    return ";".join(attributes), color, ground


@lru_cache(maxsize=4096)
def transition(before: Codes, after: Codes) -> str:
    """Return the shortest escape sequence from one style to another."""
    if before == after:
        return ""
    if after == _PLAIN:
        return _RESET
    changed = [new for old, new in zip(before, after, strict=True) if new and new != old]
    # Terminals do not reliably switch off one attribute: switch off all.
    if any(old and not new for old, new in zip(before, after, strict=True)) or (
        before[0] and before[0] != after[0]
    ):
        changed = ["0", *filter(None, after)]
    return f"\x1b[{';'.join(changed)}m"


class ThriftyDriver(LinuxDriver):
    """A Textual driver that sends only what changes."""

    def __init__(self, app: DashboardApp, **options: Any) -> None:
        super().__init__(app, **options)
        app.terminal = self
        self._seen_size: os.terminal_size | None = None
        self._memory = TerminalMemory()

    def write(self, data: str) -> None:
        """Send what changes; forget everything if the terminal was resized."""
        try:
            size = os.get_terminal_size(self.fileno)
        except OSError:  # the terminal is gone
            return
        if size != self._seen_size:
            self._seen_size = size
            self._memory.forget()
        if needed := self._memory.needed(data):
            super().write(needed)
