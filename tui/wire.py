"""Puts painted spans on the wire in few bytes: what a person watches through SSH is paid here.

Textual repaints a changed span from the left edge of its widget, and names both colours for every
run of cells. Here a span begins where it begins, and only the attribute that changes is sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import ColorSystem
from textual._compositor import ChopsUpdate, CompositorUpdate
from textual.widget import Widget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.color import Color
    from rich.console import Console
    from rich.segment import Segment
    from rich.style import Style
    from textual.filter import LineFilter
    from textual.geometry import Region

    from appliance.tui.view import View

Codes = tuple[str, str, str]  # attributes, colour, background; "" is the terminal's default
_PLAIN: Codes = ("", "", "")
_RESET = "\x1b[0m"
# Bits of a Rich style's attributes, and the codes that switch them on.
_ATTRIBUTES = {1 << 0: "1", 1 << 1: "2", 1 << 2: "3", 1 << 3: "4", 1 << 6: "7", 1 << 8: "9"}


class PaintsItself(Widget):
    """A widget that knows which of its cells changed, and what any of them look like."""

    def present(self, view: View) -> list[Region]:
        """Take in another view; regions of one line each that changed, in its content."""
        raise NotImplementedError

    def span(self, y: int, left: int, right: int) -> list[Segment]:
        """Some cells of one line of its content."""
        raise NotImplementedError


def painted(
    widget: PaintsItself, regions: list[Region], filters: Sequence[LineFilter]
) -> list[tuple[int, int, list[Segment]]]:
    """Changed cells of a widget as they stand on the screen, for `Painted`.

    Args:
        widget: nothing may lie over it.
        regions: of one line each.
        filters: that everything passes on its way to the terminal.
    """
    # What Textual has kept of these lines is out of date; it is not to be sent again for that.
    gutter, area = widget.gutter, widget.content_region
    widget._styles_cache.set_dirty(*(region.translate(gutter.top_left) for region in regions))
    background = widget.background_colors[1]
    spans = []
    for region in regions:
        segments = widget.span(region.y, region.x, region.right)
        for line_filter in filters:
            segments = line_filter.apply(segments, background)
        spans.append((area.y + region.y, area.x + region.x, segments))
    return spans


class Painted(CompositorUpdate):
    """Segments and where they stand.

    Args:
        spans: line, column, and what begins there.
    """

    def __init__(self, spans: list[tuple[int, int, list[Segment]]]) -> None:
        self._spans = spans

    def render_segments(self, console: Console) -> str:
        """The sequences that bring a terminal up to date; leaves the style reset."""
        pen = Pen(console)
        for y, x, segments in self._spans:
            pen.move(y, x)
            pen.draw(segments)
        return pen.finish()


class Pen:
    """Writes for a terminal, and remembers which style it is in."""

    def __init__(self, console: Console) -> None:
        self._system = console._color_system or ColorSystem.TRUECOLOR
        self._out: list[str] = []
        self._codes: Codes = _PLAIN

    def move(self, y: int, x: int) -> None:
        """Go to a cell."""
        self._out.append(f"\x1b[{y + 1};{x + 1}H")

    def draw(self, segments: Iterable[Segment]) -> None:
        """Write from there on."""
        for text, style, _ in segments:
            wanted = _PLAIN if style is None else codes(style, self._system)
            if wanted != self._codes:
                self._out.append(transition(self._codes, wanted))
                self._codes = wanted
            self._out.append(text)

    def finish(self) -> str:
        """All that was written, and the style reset."""
        self._out.append(transition(self._codes, _PLAIN))
        self._codes = _PLAIN
        return "".join(self._out)


class Spans(CompositorUpdate):
    """The changed spans of a screen.

    Args:
        update: what Textual would have sent.
    """

    def __init__(self, update: ChopsUpdate) -> None:
        self._update = update

    def render_segments(self, console: Console) -> str:
        """The sequences that bring a terminal up to date; leaves the style reset."""
        pen, update = Pen(console), self._update
        for y, left, right in update.spans:
            at: int | None = None  # where the terminal's cursor is on this line
            for end, (x, strip) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
                first, last = max(left, x), min(right, end)
                if strip is None or first >= last:
                    continue
                if at != first:
                    pen.move(y, first)
                whole = first == x and last == end
                pen.draw(strip if whole else strip.crop(first - x, last - x))
                at = last
        return pen.finish()


@lru_cache(maxsize=4096)
def codes(style: Style, system: ColorSystem) -> Codes:
    """What a terminal must be told for a style."""
    set_bits = style._attributes & style._set_attributes
    attributes = ";".join(code for bit, code in _ATTRIBUTES.items() if set_bits & bit)
    return (
        attributes,
        _color(style.color, system, foreground=True),
        _color(style.bgcolor, system, foreground=False),
    )


@lru_cache(maxsize=4096)
def transition(before: Codes, after: Codes) -> str:
    """The shortest sequence from one style to another."""
    if before == after:
        return ""
    if after == _PLAIN:
        return _RESET
    changed = [new for old, new in zip(before, after, strict=True) if new and new != old]
    # There is no sure way to switch one thing off, so then all is switched off.
    if any(old and not new for old, new in zip(before, after, strict=True)) or (
        before[0] and before[0] != after[0]
    ):
        changed = ["0", *filter(None, after)]
    return f"\x1b[{';'.join(changed)}m"


def _color(color: Color | None, system: ColorSystem, *, foreground: bool) -> str:
    if color is None:
        return ""
    if color.is_default:
        return ""
    return ";".join(color.downgrade(system).get_ansi_codes(foreground))
