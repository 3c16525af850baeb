"""A widget made of whole lines of text, which repaints only the cells that changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip

from appliance.tui.wire import PaintsItself

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from appliance.tui.view import View


class Lines(PaintsItself):
    """Base of the panels; a subclass says what its lines are and what they depend on."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._view: View | None = None
        self._drawn_from: tuple[object, ...] | None = None
        self._strips: list[Strip] = []

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """The lines, from the top; missing ones are blank, and those too many are cut off."""
        raise NotImplementedError

    def reads(self, view: View) -> tuple[object, ...]:
        """What `draw` depends on: as long as these are equal, nothing is drawn."""
        raise NotImplementedError

    def present(self, view: View) -> list[Region]:
        """Show another view; tells what changed."""
        self._view = view
        if not self.size:
            return []  # hidden, or not laid out yet
        source = (*self.reads(view), self.size, self.rich_style)
        if source == self._drawn_from:
            return []
        self._drawn_from = source
        old, self._strips = self._strips, self._build(view)
        if len(old) != len(self._strips):
            self.refresh()
            return []
        regions = []
        for y, (before, after) in enumerate(zip(old, self._strips, strict=True)):
            span = changed_span(before, after)
            if span is not None:
                regions.append(Region(span[0], y, span[1] - span[0], 1))
        return regions

    def on_resize(self) -> None:
        """Draw again at the new size."""
        if self._view is not None:
            self.present(self._view)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line, for the compositor."""
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)

    def span(self, y: int, left: int, right: int) -> list[Segment]:
        """Some cells of one line."""
        return list(self._strips[y].crop(left, right))

    def _build(self, view: View) -> list[Strip]:
        width, height = self.size
        base, console = self.rich_style, self.app.console
        lines = self.draw(view, width, height)[:height]
        strips = [strip_of(line, width, base, console) for line in lines]
        return strips + [Strip.blank(width, base)] * (height - len(strips))


def strip_of(line: Text, width: int, base: Style, console: Console) -> Strip:
    """A line of exactly `width` cells; what could steer the terminal is made visible instead."""
    ground = base + console.get_style(line.style)
    segments = [
        Segment(_printable(segment.text), ground + segment.style if segment.style else ground)
        for segment in line.render(console)
    ]
    # Each change of style costs some forty bytes on the wire, so equal neighbours are joined.
    return Strip(segments).adjust_cell_length(width, base).simplify()


def changed_span(old: Strip, new: Strip) -> tuple[int, int] | None:
    """First changed cell and the one after the last, or None if both lines are the same."""
    before, after = list(old), list(new)
    if before == after:
        return None
    start = 0
    while before and after and before[0] == after[0]:
        start += before.pop(0).cell_length
        after.pop(0)
    end = new.cell_length
    while before and after and before[-1] == after[-1]:
        end -= before.pop().cell_length
        after.pop()
    return (start, end) if start < end and old.cell_length == new.cell_length else (0, end)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)
