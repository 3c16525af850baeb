"""Generated and prompt tokens per second, now and over the last minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import Panel
from appliance.tui.widgets.sparkline import sparkline

if TYPE_CHECKING:
    from appliance.tui.history import History
    from appliance.tui.view import View

GRAPH_SECONDS = 300  # seconds across the width of a graph


class Throughput(Panel):
    TITLE = "Tokens per second"

    def reads(self, view: View) -> tuple[object, ...]:
        return (view.state.stats,)

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        history = view.state.history
        upper = max(0, (height - 2) // 2)
        lower = max(0, height - 2 - upper)
        return [
            *_graph("out", history.generation_rate, palette.TOKENS_OUT, width, upper),
            *_graph("in", history.prompt_rate, palette.TOKENS_IN, width, lower),
        ]


def _graph(name: str, history: History, color: str, width: int, height: int) -> list[Text]:
    shown = history.columns(width, GRAPH_SECONDS)
    top = max(shown, default=0.0)
    now = numbers.rate(history.latest) if shown else "-"
    heading = Text.assemble((f"{name:<4}", palette.MUTED), (now, f"bold {color}"))
    peak = f"peak {numbers.rate(history.peak)}"
    heading.append(peak.rjust(max(0, width - heading.cell_len)), palette.MUTED)
    return [heading, *(Text(line, color) for line in sparkline(shown, width, height, top))]
