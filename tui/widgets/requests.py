"""The table of sequences: owner, progress and blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.look import SequenceKey, Sort
from appliance.tui.messages import SequenceChosen, SortChosen
from appliance.tui.state import is_running
from appliance.tui.widgets.panel import Panel, shortened

if TYPE_CHECKING:
    from textual.events import Click

    from appliance.stats import SequenceView
    from appliance.tui.view import View

_BAR = "━"
_BAR_HEADING = "   cached, prompt, generated"
_MIN_BAR = 16  # cells; narrower terminals have none


@dataclass(frozen=True, slots=True)
class Column:
    """A column; numbers are right-aligned, words left-aligned."""

    sort: Sort  # heading and sort order
    width: int
    right: bool = True


_COLUMNS = (
    Column(Sort.REQUEST, 26, right=False),
    Column(Sort.KEY, 16, right=False),
    Column(Sort.ADAPTER, 14, right=False),
    Column(Sort.STATE, 10, right=False),
    Column(Sort.PROMPT, 8),
    Column(Sort.CACHED, 8),
    Column(Sort.GENERATED, 10),
    Column(Sort.SPEED, 7),
    Column(Sort.BLOCKS, 8),
    Column(Sort.AGE, 9),
)
_MARK = 4  # focus mark and swatch
_SHORT_REQUEST, _SHORT_KEY = 18, 12
# Columns that narrow terminals drop, in this order.
_DISPENSABLE = (
    Sort.CACHED, Sort.STATE, Sort.PROMPT, Sort.KEY,
    Sort.SPEED, Sort.AGE, Sort.ADAPTER,
)  # fmt: skip


def columns_for(width: int, *, adapted: bool = False) -> list[Column]:
    """Return the columns that fit; the adapters' only if a sequence has one."""
    columns = [column for column in _COLUMNS if adapted or column.sort is not Sort.ADAPTER]
    if _width_of(columns) > width:
        columns[0] = replace(columns[0], width=_SHORT_REQUEST)
        columns[1] = replace(columns[1], width=_SHORT_KEY)
    for sort in _DISPENSABLE:
        if _width_of(columns) > width:
            columns = [column for column in columns if column.sort is not sort]
    return columns


def _width_of(columns: list[Column]) -> int:
    return _MARK + sum(column.width for column in columns)


class RequestTable(Panel):
    """One line per sequence; scrolls to the focused one."""

    TITLE = "Requests"

    def reads(self, view: View) -> tuple[object, ...]:
        look = view.look
        return (
            view.state.sequences, look.focus, look.sort, look.ascending, look.query,
            view.state.stats is None, view.lettered,
        )  # fmt: skip

    def on_click(self, event: Click) -> None:
        at = event.get_content_offset(self)
        if self._view is None or at is None:
            return
        if at.y == 0:
            if (sort := _sort_at(self._view, at.x, self.size.width)) is not None:
                self.post_message(SortChosen(sort))
            return
        room = _room(self._view, self.size.height)
        index = _first_shown(self._view, room) + at.y - 1
        if 0 < at.y <= room and index < len(self._view.listed):
            chosen = self._view.listed[index]
            self.post_message(SequenceChosen(SequenceKey.of(chosen)))

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw a heading, then the sequences that fit."""
        sequences = view.listed
        if not sequences:
            return [_heading(view, width), Text(_why_none(view), palette.MUTED)]
        room = _room(view, height)
        first = _first_shown(view, room)
        shown = sequences[first : first + room]
        longest = max(one.prompt_tokens + one.output_tokens for one in sequences)
        lines = [_heading(view, width), *(_row(view, one, width, longest) for one in shown)]
        if hidden := len(sequences) - len(shown):
            lines.append(Text(f"{' ' * _MARK}and {numbers.count(hidden)} more", palette.MUTED))
        return lines


def _why_none(view: View) -> str:
    if view.look.query and view.state.sequences:
        return f"No request contains {view.look.query!r}; esc shows all."
    return "" if view.state.stats is None else "No requests at the moment."


def _room(view: View, height: int) -> int:
    """Return the number of lines for sequences; the last line counts hidden ones."""
    room = max(0, height - 1)
    return room if len(view.listed) <= room else max(0, room - 1)


def _first_shown(view: View, room: int) -> int:
    for index, sequence in enumerate(view.listed):
        if SequenceKey.of(sequence) == view.focus:
            return max(0, index - room + 1)
    return 0


def _columns(view: View, width: int) -> list[Column]:
    return columns_for(width, adapted=any(one.adapter for one in view.state.sequences))


def _sort_at(view: View, x: int, width: int) -> Sort | None:
    right = _MARK
    for column in _columns(view, width):
        right += column.width
        if _MARK <= x < right:
            return column.sort
    return None


def _heading(view: View, width: int) -> Text:
    columns = _columns(view, width)
    line = Text(" " * _MARK)
    for column in columns:
        chosen = column.sort is view.look.sort
        arrow = ("▲" if view.look.ascending else "▼") if chosen else ""
        color = palette.BRIGHT if chosen else palette.MUTED
        line.append(_fitted(column.sort.value + arrow, column), color)
    if width - _width_of(columns) >= max(_MIN_BAR, len(_BAR_HEADING)):
        line.append(_BAR_HEADING, palette.MUTED)
    return line


def _row(view: View, sequence: SequenceView, width: int, longest: int) -> Text:
    running = is_running(sequence)
    swatch, hue = view.swatch(sequence)
    focused = SequenceKey.of(sequence) == view.focus
    color = palette.TEXT if running else palette.MUTED
    line = Text.assemble((" ▸" if focused else "  ", palette.BRIGHT), (f"{swatch} ", hue))
    columns = _columns(view, width)
    values = {
        Sort.REQUEST: _named(sequence, columns[0].width - 1),
        Sort.KEY: sequence.owner or "-",
        Sort.ADAPTER: sequence.adapter or "-",
        Sort.STATE: sequence.status,
        Sort.PROMPT: numbers.count(sequence.prompt_tokens),
        Sort.CACHED: numbers.count(sequence.cached_tokens),
        Sort.GENERATED: numbers.count(sequence.output_tokens),
        Sort.SPEED: numbers.rate(sequence.tokens_per_second) if sequence.output_tokens else "-",
        Sort.BLOCKS: numbers.count(sequence.blocks),
        Sort.AGE: numbers.clock(sequence.age_seconds),
    }
    for column in columns:
        line.append(_fitted(values[column.sort], column), color)
    room = width - _width_of(columns)
    if room >= _MIN_BAR:
        line.append("   ").append_text(_bar(sequence, room - 3, longest, hue))
    if focused:
        line.append(" " * max(0, width - line.cell_len))
        line.stylize(f"on {palette.FOCUSED}")
    return line


def _named(sequence: SequenceView, room: int) -> str:
    """Shorten the request id, but keep the index that tells siblings apart."""
    sibling = f" #{sequence.index}" if sequence.index else ""
    return shortened(sequence.request_id, room - len(sibling)) + sibling


def _fitted(words: str, column: Column) -> str:
    """Pad or cut to the column's width, with a space to the next column."""
    words = shortened(words, column.width - 1)
    space = " " * (column.width - cell_len(words))
    return space + words if column.right else words + space


def _bar(sequence: SequenceView, width: int, longest: int, hue: str) -> Text:
    line = Text()
    seen = drawn = 0
    for tokens, color in (
        (sequence.cached_tokens, palette.CACHED),
        (sequence.prompt_tokens - sequence.cached_tokens, palette.ACTIVE),
        (sequence.output_tokens, hue),
    ):
        seen += max(0, tokens)
        end = min(width, round(width * seen / longest)) if longest else 0
        line.append(_BAR * max(0, end - drawn), color)
        drawn = max(drawn, end)
    return line
