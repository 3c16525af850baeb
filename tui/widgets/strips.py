"""Lines below the block map: the blocks in host memory, and the slots of recurrent state."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.driver import Driver

    from appliance.stats import EngineStats
    from appliance.tui.view import View

_MIN_BAR = 12  # cells; narrower terminals show only words


class Strip(Lines):
    """A bar to scale in the block map's colours, then its numbers; hidden if there is nothing."""

    NAME: ClassVar[str]
    DEFAULT_CSS = """
    Strip { height: 1; display: none; }
    Strip.-there { display: block; }
    """

    def capacity(self, engine: EngineStats) -> int:
        """Return the number that fills the bar; 0 if the engine has none of this."""
        raise NotImplementedError

    def words(self, view: View, engine: EngineStats) -> str:
        raise NotImplementedError

    def parts(self, view: View, engine: EngineStats) -> Iterable[tuple[int, str, str]]:
        """Yield (number, colour, letter for terminals without colours) of each part."""
        raise NotImplementedError

    def dims(self, view: View) -> bool:
        return not view.latest.current

    def present(self, view: View, terminal: Driver | None = None) -> None:
        """Show another view; hide the line if the engine has none of this."""
        stats = view.state.stats
        there = stats is not None and self.capacity(stats.engine) > 0
        if there is not self.has_class("-there"):
            self.set_class(there, "-there")
        super().present(view, terminal)

    def reads(self, view: View) -> tuple[object, ...]:
        stats = view.state.stats
        engine = stats.engine if stats is not None else None
        return engine, view.focused, view.lettered, view.latest.current

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        stats = view.state.stats
        if stats is None or not self.capacity(stats.engine):
            return []  # e.g. while the server restarts
        words = self.words(view, stats.engine)
        room = width - len(self.NAME) - len(words) - 2
        line = Text(self.NAME, palette.MUTED)
        if room >= _MIN_BAR:
            line.append_text(self._bar(view, stats.engine, room)).append("  ")
        return [line.append(words, palette.MUTED)]

    def _bar(self, view: View, engine: EngineStats, width: int) -> Text:
        """Draw the bar; every nonzero part gets a cell."""
        whole = self.capacity(engine)
        line = Text()
        for number, color, letter in self.parts(view, engine):
            left = width - line.cell_len
            cells = min(left, max(number > 0, round(width * number / whole)))
            line.append(letter * cells if view.lettered else " " * cells, _style(view, color))
        left = width - line.cell_len
        free = _shade(palette.FREE, self.dims(view))
        return line.append("." * left if view.lettered else " " * left, _style(view, free))


class HostStrip(Strip):
    """Blocks in host memory, on their own scale.

    Blocks have no fixed place there, so the line shows only their number.
    """

    NAME = "host memory "

    def capacity(self, engine: EngineStats) -> int:
        return engine.kv_host_capacity

    def words(self, view: View, engine: EngineStats) -> str:
        focused = view.focused.host_blocks if view.focused is not None else None
        kept = engine.kv_host_blocks - engine.kv_host_swapped
        facts = [
            f"{numbers.count(engine.kv_host_swapped)} swapped",
            *([f"{numbers.count(focused)} of it in focus"] if focused else []),
            *([f"{numbers.count(kept)} cached"] if kept else []),
        ]
        return f"{', '.join(facts)}, of {numbers.counted(engine.kv_host_capacity, 'block')}"

    def dims(self, view: View) -> bool:
        return view.focused is not None or super().dims(view)

    def parts(self, view: View, engine: EngineStats) -> Iterable[tuple[int, str, str]]:
        """Yield swapped blocks, first those in focus, and cached ones."""
        focused = min(view.focused.host_blocks, engine.kv_host_swapped) if view.focused else 0
        dims = self.dims(view)
        yield focused, palette.SWAPPED, "s"
        yield (
            engine.kv_host_swapped - focused,
            _shade(palette.SWAPPED, dims),
            "-" if dims else "s",
        )
        yield engine.kv_host_blocks - engine.kv_host_swapped, _shade(palette.CACHED, dims), ":"


class StateStrip(Strip):
    """Used state slots, cached checkpoints and free rows, for models with recurrent layers."""

    NAME = "states "

    def capacity(self, engine: EngineStats) -> int:
        return engine.state_slots + engine.state_checkpoints if engine.state_slots else 0

    def words(self, view: View, engine: EngineStats) -> str:
        slots = numbers.counted(engine.state_slots, "slot")
        checkpoints = numbers.counted(engine.state_checkpoints, "checkpoint")
        return (
            f"{numbers.count(engine.state_slots_used)} of {slots} used,"
            f" {numbers.count(engine.state_checkpoints_cached)} of {checkpoints} cached"
        )

    def parts(self, view: View, engine: EngineStats) -> Iterable[tuple[int, str, str]]:
        dims = self.dims(view)
        yield engine.state_slots_used, _shade(palette.ACTIVE, dims), "#"
        yield engine.state_checkpoints_cached, _shade(palette.CACHED, dims), ":"


def _shade(color: str, dims: bool) -> str:
    return palette.dimmed(color) if dims else color


def _style(view: View, color: str) -> str:
    return color if view.lettered else f"on {color}"
