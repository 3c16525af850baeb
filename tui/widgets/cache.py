"""The KV cache's use, and the blocks saved by sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import HEADLINE, Panel, pair

if TYPE_CHECKING:
    from appliance.stats import EngineStats
    from appliance.tui.view import View

_BAR = "━"


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
