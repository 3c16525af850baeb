"""Latencies: time to the first token, and between tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from appliance.events import Quantiles
    from appliance.tui.view import View

_COLUMN = 8


class Latency(Panel):
    """A table of quantiles over the last minute."""

    TITLE = "Latency, last minute"
    DEFAULT_CSS = "Latency { height: 7; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return (view.state.stats,)

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        stats = view.state.stats
        heading = Text("p50".rjust(_COLUMN) + "p90".rjust(_COLUMN) + "p99".rjust(_COLUMN))
        heading.stylize(palette.MUTED)
        heading.pad_left(max(0, width - 3 * _COLUMN))
        return [
            heading,
            _quantiles("first token", stats.time_to_first_token if stats else None, width),
            _quantiles("between tokens", stats.inter_token_latency if stats else None, width),
            _quantiles("whole request", stats.end_to_end if stats else None, width),
            _quantiles("in the queue", stats.queue_wait if stats else None, width),
        ]


def _quantiles(name: str, measured: Quantiles | None, width: int) -> Text:
    line = Text(name, palette.MUTED)
    line.truncate(max(0, width - 3 * _COLUMN), overflow="ellipsis", pad=True)
    if measured is None or not measured.count:
        return line.append("-".rjust(_COLUMN) * 3, palette.MUTED)
    line.append(numbers.duration(measured.p50).rjust(_COLUMN), f"bold {palette.TEXT}")
    line.append(numbers.duration(measured.p90).rjust(_COLUMN), palette.TEXT)
    return line.append(numbers.duration(measured.p99).rjust(_COLUMN), palette.TEXT)
