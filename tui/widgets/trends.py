"""Graphs of the last minutes, for terminals with room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import Panel
from appliance.tui.widgets.sparkline import sparkline
from appliance.tui.widgets.throughput import GRAPH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.tui.history import History
    from appliance.tui.view import View


class Trends(Panel):
    TITLE = "Last five minutes"
    DEFAULT_CSS = "Trends { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return (view.state.stats,)

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw the graphs that fit, each with a heading."""
        history = view.state.history
        graphs: list[tuple[str, History, str, Callable[[float], str], float | None]] = [
            ("first token, p50", history.first_token, palette.WARNING, numbers.duration, None),
            ("between, p50", history.inter_token, palette.ACCENT, numbers.duration, None),
            (
                "between tokens, p99",
                history.inter_token_p99,
                palette.ACCENT,
                numbers.duration,
                None,
            ),
            ("KV cache in use", history.kv_usage, palette.ACTIVE, numbers.percent, 1.0),
            ("prefix hits", history.hit_rate, palette.WRITING, numbers.percent, 1.0),
            ("requests waiting", history.waiting, palette.BAD, _whole, None),
            ("steps a second", history.steps, palette.TOKENS_OUT, numbers.rate, None),
        ]
        each = max(3, height // len(graphs))
        lines: list[Text] = []
        for name, values, color, words, top in graphs[: height // each]:
            shown = values.columns(width, GRAPH_SECONDS)
            heading = Text(f"{name}  ", palette.MUTED)
            heading.append(words(values.latest) if shown else "-", f"bold {color}")
            peak = f" peak {words(values.peak)}"
            heading.append(peak.rjust(max(0, width - heading.cell_len)), palette.MUTED)
            full = max(shown, default=0.0) if top is None else top
            bars = sparkline(shown, width, each - 2, full)
            lines += [heading, *(Text(line, color) for line in bars), Text()]
        return lines


def _whole(number: float) -> str:
    return numbers.count(round(number))
