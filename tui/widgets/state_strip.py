"""One line below the block map for the slots of recurrent state."""

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

_NAME = "states "
_MIN_BAR = 12  # cells; narrower terminals show only words


class StateStrip(Lines):
    """Used state slots, cached checkpoints and free rows, for models with recurrent layers."""

    DEFAULT_CSS = """
    StateStrip { height: 1; display: none; }
    StateStrip.-there { display: block; }
    """

    def present(self, view: View, terminal: Driver | None = None) -> None:
        """Show another view; hide the line if the model has no state."""
        stats = view.state.stats
        there = stats is not None and stats.engine.state_slots > 0
        if there is not self.has_class("-there"):
            self.set_class(there, "-there")
        super().present(view, terminal)

    def reads(self, view: View) -> tuple[object, ...]:
        stats = view.state.stats
        return stats.engine if stats is not None else None, view.lettered, view.latest.current

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw used slots, cached checkpoints and free rows, then their numbers."""
        stats = view.state.stats
        if stats is None or not stats.engine.state_slots:
            return []
        words = _words(stats.engine)
        room = width - len(_NAME) - len(words) - 2
        line = Text(_NAME, palette.MUTED)
        if room >= _MIN_BAR:
            line.append_text(_bar(view, stats.engine, room)).append("  ")
        return [line.append(words, palette.MUTED)]


def _words(engine: EngineStats) -> str:
    slots = numbers.counted(engine.state_slots, "slot")
    checkpoints = numbers.counted(engine.state_checkpoints, "checkpoint")
    return (
        f"{numbers.count(engine.state_slots_used)} of {slots} used,"
        f" {numbers.count(engine.state_checkpoints_cached)} of {checkpoints} cached"
    )


def _bar(view: View, engine: EngineStats, width: int) -> Text:
    dims = not view.latest.current
    parts = (
        (engine.state_slots_used, shade(palette.ACTIVE, dims), "#"),
        (engine.state_checkpoints_cached, shade(palette.CACHED, dims), ":"),
    )
    whole = engine.state_slots + engine.state_checkpoints
    return scale_bar(view, parts, whole, width, shade(palette.FREE, dims))
