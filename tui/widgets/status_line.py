"""The dashboard in two lines, for terminals too small for panels."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.state import is_running
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.events import Quantiles, Stats
    from appliance.stats import SequenceView
    from appliance.tui.view import View


class StatusLine(Lines):
    """Load and cache in the first line; latency or the focused sequence in the second."""

    DEFAULT_CSS = "StatusLine { height: 2; padding: 0 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.stats, view.focused

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        stats, focused = view.state.stats, view.focused
        if stats is None:
            return []
        second = _latency(stats) if focused is None else _sequence(focused)
        lines = [_facts(facts) for facts in (_load(stats), second)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines


def _load(stats: Stats) -> list[tuple[str, str]]:
    gpus = stats.machine.gpus if stats.machine is not None else ()
    use = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    watts = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
    return [
        (numbers.rate(stats.generation_tokens_per_second), "out/s"),
        (numbers.rate(stats.prompt_tokens_per_second), "in/s"),
        (numbers.count(stats.requests_running), "running"),
        (numbers.count(stats.requests_waiting), "waiting"),
        (numbers.percent(stats.engine.kv_usage), "KV"),
        *([(_ready(stats), "replicas")] if stats.replicas else []),
        *([(f"{fmean(use):.0%}", "GPU")] if use else []),
        *([(f"{sum(watts):.0f}", "W")] if watts else []),
    ]


def _ready(stats: Stats) -> str:
    ready = sum(one.state == "ready" for one in stats.replicas)
    return f"{ready}/{len(stats.replicas)}"


def _latency(stats: Stats) -> list[tuple[str, str]]:
    engine = stats.engine
    looked_up = engine.prefix_queries_total
    hits = numbers.percent(engine.prefix_hits_total / looked_up) if looked_up else "-"
    return [
        (_quantile(stats.time_to_first_token, "p50"), "first token"),
        (_quantile(stats.inter_token_latency, "p50"), "between,"),
        (_quantile(stats.inter_token_latency, "p99"), "p99"),
        (hits, "hits"),
        (numbers.count(engine.preemptions_total), "preempted"),
    ]


def _sequence(sequence: SequenceView) -> list[tuple[str, str]]:
    return [
        (sequence.request_id[:16], "" if is_running(sequence) else sequence.status),
        (numbers.count(sequence.prompt_tokens), "prompt"),
        (numbers.count(sequence.cached_tokens), "cached"),
        (numbers.count(sequence.output_tokens), "out"),
        (numbers.count(sequence.blocks), "blocks"),
        (numbers.clock(sequence.age_seconds), ""),
    ]


def _quantile(measured: Quantiles, name: Literal["p50", "p99"]) -> str:
    return numbers.duration(getattr(measured, name)) if measured.count else "-"


def _facts(facts: list[tuple[str, str]]) -> Text:
    line = Text()
    for value, name in facts:
        if line:
            line.append("  ")
        line.append(value, f"bold {palette.TEXT}")
        if name:
            line.append(f" {name}", palette.MUTED)
    return line
