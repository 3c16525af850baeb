"""The top line: model and connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.state import ConnectionPhase
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.events import Info
    from appliance.tui.view import View

_NAME = " ▌appliance top"
_DOTS = {
    ConnectionPhase.CONNECTING: ("○", palette.WARNING),
    ConnectionPhase.LIVE: ("●", palette.GOOD),
    ConnectionPhase.LOST: ("○", palette.BAD),
    ConnectionPhase.NO_KEY: ("○", palette.BAD),
    ConnectionPhase.UNAUTHORIZED: ("○", palette.BAD),
    ConnectionPhase.FOREIGN: ("○", palette.BAD),
    ConnectionPhase.ENDED: ("■", palette.MUTED),
}

_STATES = {"failed": palette.BAD, "asleep": palette.MUTED}  # the others are warnings


class Header(Lines):
    """One line; on narrow terminals it drops facts from the end."""

    DEFAULT_CSS = "Header { height: 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        stats = view.state.stats
        uptime = int(stats.uptime_seconds) if stats else None
        return (
            view.state.info, uptime, view.connection_words, view.paused, view.url,
            view.recording, view.latest.connection.phase, _replicas(view),
        )  # fmt: skip

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw the model on the left, the connection on the right."""
        right = _connection(view, with_url=width >= 120)
        line = Text.assemble((_NAME, f"bold {palette.ACCENT}"))
        if view.state.info is not None:
            line.append(f"  {view.state.info.model}", f"bold {palette.BRIGHT}")
            for fact, color in (*_replicas(view), *_facts(view.state.info)):
                if line.cell_len + len(fact) + 3 + right.cell_len + 2 > width:
                    break
                line.append(" · ", palette.FAINT)
                line.append(fact, color)
        line.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis", pad=True)
        return [line.append(" ").append_text(right)]


def _replicas(view: View) -> tuple[tuple[str, str], ...]:
    """Return the shown replica and the number ready; empty for a single engine process."""
    stats, info = view.state.stats, view.state.info
    if stats is None or info is None or not stats.replicas:
        return ()
    ready = sum(one.state == "ready" for one in stats.replicas)
    count = len(stats.replicas)
    return (
        (f"replica {info.replica}", palette.BRIGHT),
        (f"{ready} of {count} ready", palette.MUTED if ready == count else palette.WARNING),
    )


def _facts(info: Info) -> list[tuple[str, str]]:
    facts = [("its metrics only", palette.WARNING)] if info.protocol == 0 else []
    if info.state != "ready":
        facts.append((info.state, _STATES.get(info.state, palette.WARNING)))
    if info.models:
        resident = [one.name for one in info.models if one.state == "ready"]
        number = f"{len(resident)} of {len(info.models)} models in memory"
        facts.append((f"{number}: {', '.join(resident)}" if resident else number, palette.BRIGHT))
    if info.restarts:
        facts.append((f"restarted {_times(info.restarts)}", palette.WARNING))
    facts += [
        (fact, palette.MUTED)
        for fact in (
            info.weight_format,
            f"KV {info.kv_format}" if info.kv_format else "",
            info.device,
            f"{numbers.count(info.context_length)} context" if info.context_length else "",
            info.backend,
        )
        if fact
    ]
    return facts


def _times(number: int) -> str:
    return "once" if number == 1 else f"{numbers.count(number)} times"


def _connection(view: View, *, with_url: bool) -> Text:
    dot, color = _DOTS[view.latest.connection.phase]
    if view.paused and view.latest.connection.phase is ConnectionPhase.LIVE:
        dot, color = "‖", palette.WARNING
    line = Text("● recording  ", palette.BAD) if view.recording else Text()
    if with_url:
        line.append(f"{view.url}  ", palette.MUTED)
    line.append(f"{dot} {view.connection_words} ", color)
    stats = view.state.stats
    if stats is not None and view.latest.connection.phase is ConnectionPhase.LIVE:
        line.append(f" up {numbers.clock(int(stats.uptime_seconds))} ", palette.MUTED)
    return line
