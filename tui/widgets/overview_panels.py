"""The overview's panels: latency, throughput and trends, the KV cache, and the engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import HEADLINE, Panel, pair
from appliance.tui.widgets.sparkline import sparkline, stacked

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.events import Quantiles
    from appliance.stats import EngineStats
    from appliance.tui.history import History
    from appliance.tui.view import View


_COLUMN = 8
GRAPH_SECONDS = 300  # seconds across the width of a graph
_BAR = "━"


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


class CachePanel(Panel):
    """A bar in the block map's colours, and shares."""

    TITLE = "KV cache"
    DEFAULT_CSS = "CachePanel { height: 8; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.stats, view.state.info

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        if view.state.stats is None:
            return []
        engine = view.state.stats.engine
        info = view.state.info
        held = f"of {numbers.size(info.kv_bytes)}" if info and info.kv_bytes else ""
        lines = [
            pair("in use", numbers.percent(engine.kv_usage), width, note=held, color=HEADLINE),
            _bar(engine, width),
            _prefix_hits(engine, width),
        ]
        slots = numbers.percent(engine.kv_utilization) if engine.blocks_active else "-"
        lines.append(pair("slots that hold tokens", slots, width))
        swaps = f"{numbers.count(engine.swaps_total)} swapped" if engine.swaps_total else ""
        preempted = numbers.count(engine.preemptions_total)
        lines.append(pair("preemptions", preempted, width, note=swaps))
        lines.append(pair("aborted", numbers.count(engine.aborted_total), width))
        return lines


def _prefix_hits(engine: EngineStats, width: int) -> Text:
    looked_up = engine.prefix_queries_total
    value = numbers.percent(engine.prefix_hits_total / looked_up) if looked_up else "-"
    note = numbers.counted(engine.prefix_hits_total, "token")
    return pair("prefix hits", value, width, note=note)


def _bar(engine: EngineStats, width: int) -> Text:
    line = Text()
    seen = drawn = 0
    for blocks, color in (
        (engine.blocks_shared, palette.SHARED),
        (engine.blocks_active - engine.blocks_shared, palette.ACTIVE),
        (engine.blocks_cached, palette.CACHED),
        (engine.blocks_free, palette.FREE),
    ):
        seen += max(0, blocks)
        end = min(width, round(width * seen / engine.blocks_total)) if engine.blocks_total else 0
        line.append(_BAR * (end - drawn), color)
        drawn = max(drawn, end)
    return line


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
