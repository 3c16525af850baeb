"""What the engine does in a step, and how much it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import HEADLINE, Panel, pair

if TYPE_CHECKING:
    from rich.text import Text

    from appliance.tui.view import View


class Engine(Panel):
    """Names and numbers."""

    TITLE = "Engine"
    DEFAULT_CSS = "Engine { height: 8; }"

    def reads(self, view: View) -> tuple[object, ...]:
        """The engine's numbers and what was loaded."""
        return view.state.stats, view.state.info

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Six lines."""
        stats, info = view.state.stats, view.state.info
        if stats is None:
            return []
        engine = stats.engine
        most = f"of {info.max_num_seqs}" if info and info.max_num_seqs else ""
        failed = f"{numbers.count(stats.requests_failed)} failed" if stats.requests_failed else ""
        inside = engine.model_seconds / engine.step_seconds if engine.step_seconds else 0.0
        running = numbers.count(stats.requests_running)
        rows = f"{engine.step_prefill_tokens} + {engine.step_decode_tokens}"
        memory = numbers.size(info.weight_bytes) if info and info.weight_bytes else "-"
        return [
            pair("running", running, width, note=most, color=HEADLINE),
            pair(
                "waiting",
                numbers.count(stats.requests_waiting),
                width,
                color=palette.WARNING if stats.requests_waiting else palette.TEXT,
            ),
            pair("finished", numbers.count(stats.requests_finished), width, note=failed),
            pair("last step, prefill + decode", rows, width),
            pair(
                "step time",
                numbers.duration(engine.step_seconds),
                width,
                note=f"{inside:.0%} in the model" if inside else "",
            ),
            pair("weights", memory, width),
        ]
