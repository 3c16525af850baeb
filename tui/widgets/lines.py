"""A widget of whole lines; repaints only lines that changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.filter import ANSIToTruecolor
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text
    from textual.driver import Driver
    from textual.filter import LineFilter

    from appliance.tui.view import View


class Lines(Widget):
    """Base of all widgets that show a view; subclasses define the lines and their inputs."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._view: View | None = None
        self._drawn_from: tuple[object, ...] | None = None
        self._strips: list[Strip] = []

    def reads(self, view: View) -> tuple[object, ...]:
        """Return the inputs of the lines; while they are equal, nothing is drawn."""
        raise NotImplementedError

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw from the top; missing lines are blank, extra ones are cut off."""
        raise NotImplementedError

    def present(self, view: View, terminal: Driver | None = None) -> None:
        """Show another view.

        `terminal` is the driver if nothing lies over the screen, so that it may be written to
        directly.
        """
        self._view = view
        if not self.size:
            return  # hidden, or not laid out yet
        source = (*self.reads(view), self.size, self.rich_style)
        if source != self._drawn_from:
            self._drawn_from = source
            self.redraw(view, terminal)

    def redraw(self, view: View, terminal: Driver | None) -> None:
        """Draw the lines, and tell Textual which changed."""
        width, height = self.size
        base, console = self.rich_style, self.app.console
        lines = self.draw(view, width, height)[:height]
        old, self._strips = self._strips, [strip_of(line, width, base, console) for line in lines]
        self._strips += [Strip.blank(width, base)] * (height - len(lines))
        both = enumerate(zip(old, self._strips, strict=False))
        changed = [Region(0, y, width, 1) for y, (one, other) in both if one != other]
        if len(old) != height:
            self.refresh()
        elif changed:
            self.refresh(*changed)

    def get_line_filters(self) -> list[LineFilter]:
        """Drop Textual's conversion of ANSI colours, which no widget here uses."""
        filters = super().get_line_filters()
        return [one for one in filters if not isinstance(one, ANSIToTruecolor)]

    def on_resize(self) -> None:
        if self._view is not None:
            self.present(self._view)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)


def strip_of(line: Text, width: int, base: Style, console: Console) -> Strip:
    """Build a strip of exactly `width` cells; control characters become visible."""
    ground = base + console.get_style(line.style)
    segments = [
        Segment(_printable(segment.text), ground + segment.style if segment.style else ground)
        for segment in line.render(console)
    ]
    # Each change of style costs bytes: join equal neighbours.
    return Strip(segments).adjust_cell_length(width, base).simplify()


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)
