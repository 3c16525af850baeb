"""One line below the block map for the blocks in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.lines import Lines
from appliance.tui.widgets.scale_bar import scale_bar, shade

if TYPE_CHECKING:
    from textual.driver import Driver

    from appliance.stats import EngineStats
    from appliance.tui.view import View

_NAME = "host memory "
_MIN_BAR = 12  # cells; narrower terminals show only words


class HostStrip(Lines):
    """Blocks in host memory, on their own scale.

    Blocks have no fixed place there, so the line shows only their number.
    """

    DEFAULT_CSS = """
    HostStrip { height: 1; display: none; }
    HostStrip.-there { display: block; }
    """

    def present(self, view: View, terminal: Driver | None = None) -> None:
        """Show another view; hide the line if there is no such tier."""
        stats = view.state.stats
        there = stats is not None and stats.engine.kv_host_capacity > 0
        if there is not self.has_class("-there"):
            self.set_class(there, "-there")
        super().present(view, terminal)

    def reads(self, view: View) -> tuple[object, ...]:
        stats = view.state.stats
        engine = stats.engine if stats is not None else None
        return engine, view.focused, view.lettered, view.latest.current

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw swapped, cached and free blocks to scale, then their numbers."""
        stats = view.state.stats
        if stats is None or not stats.engine.kv_host_capacity:
            return []  # e.g. while the server restarts
        engine = stats.engine
        words = _words(engine, view.focused.host_blocks if view.focused is not None else None)
        room = width - len(_NAME) - len(words) - 2
        line = Text(_NAME, palette.MUTED)
        if room >= _MIN_BAR:
            line.append_text(_bar(view, engine, room)).append("  ")
        return [line.append(words, palette.MUTED)]


def _words(engine: EngineStats, focused: int | None) -> str:
    kept = engine.kv_host_blocks - engine.kv_host_swapped
    facts = [
        f"{numbers.count(engine.kv_host_swapped)} swapped",
        *([f"{numbers.count(focused)} of it in focus"] if focused else []),
        *([f"{numbers.count(kept)} cached"] if kept else []),
    ]
    return f"{', '.join(facts)}, of {numbers.counted(engine.kv_host_capacity, 'block')}"


def _bar(view: View, engine: EngineStats, width: int) -> Text:
    """Draw to scale; every nonzero part gets a cell."""
    focused = min(view.focused.host_blocks, engine.kv_host_swapped) if view.focused else 0
    dims = view.focused is not None or not view.latest.current
    parts = (
        (focused, palette.SWAPPED, "s"),
        (engine.kv_host_swapped - focused, shade(palette.SWAPPED, dims), "-" if dims else "s"),
        (engine.kv_host_blocks - engine.kv_host_swapped, shade(palette.CACHED, dims), ":"),
    )
    return scale_bar(view, parts, engine.kv_host_capacity, width, shade(palette.FREE, dims))
