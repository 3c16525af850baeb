"""The engine's steps and totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import HEADLINE, Panel, pair
from appliance.tui.widgets.sparkline import stacked
from appliance.tui.widgets.throughput import GRAPH_SECONDS

if TYPE_CHECKING:
    from appliance.stats import EngineStats
    from appliance.tui.view import View


class EnginePanel(Panel):
    TITLE = "Engine"
    DEFAULT_CSS = "EnginePanel { height: 7; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.stats, view.state.info

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        stats, info = view.state.stats, view.state.info
        if stats is None:
            return []
        engine = stats.engine
        most = f"of {info.max_num_seqs}" if info and info.max_num_seqs else ""
        failed = f"{numbers.count(stats.requests_failed)} failed" if stats.requests_failed else ""
        waiting = (
            f"{numbers.count(stats.requests_waiting)} waiting" if stats.requests_waiting else ""
        )
        running = numbers.count(stats.requests_running)
        lines = [
            pair(
                "running", running, width, note=f"{most}  {waiting}".strip(),
                color=f"bold {palette.WARNING}" if waiting else HEADLINE,
            ),
            pair("finished", numbers.count(stats.requests_finished), width, note=failed),
        ]  # fmt: skip
        lines += _steps(view, engine, width)
        if engine.draft_tokens_total:
            accepted = engine.accepted_tokens_total / engine.draft_tokens_total
            lines.append(pair("guessed tokens accepted", numbers.percent(accepted), width))
        return lines


def _steps(view: View, engine: EngineStats, width: int) -> list[Text]:
    history = view.state.history
    inside = engine.model_seconds / engine.step_seconds if engine.step_seconds else 0.0
    decode = history.decode_rows.columns(width, GRAPH_SECONDS)
    prefill = history.prefill_rows.columns(width, GRAPH_SECONDS)
    top = max((one + other for one, other in zip(decode, prefill, strict=True)), default=0.0)
    rows = Text("rows a step  ", palette.MUTED)
    rows.append(f"{engine.step_decode_tokens} decode", palette.TOKENS_OUT)
    rows.append(" + ", palette.MUTED)
    rows.append(f"{engine.step_prefill_tokens} prefill", palette.PROMPT_ROWS)
    colors = (palette.TOKENS_OUT, palette.PROMPT_ROWS)
    return [
        pair(
            "step time", numbers.duration(engine.step_seconds), width,
            note=f"{inside:.0%} in the model" if inside else "",
        ),
        rows,
        *stacked(decode, prefill, width, 1, top, colors),
    ]  # fmt: skip
