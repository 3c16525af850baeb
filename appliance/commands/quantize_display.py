"""Displays a run of `appliance quantize`, as a table on a terminal, as lines, or as JSON."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from appliance.progress.quantize_events import (
    CardWritten,
    Done,
    Measuring,
    QuantizeEvent,
    RunEstimated,
    RunFailed,
    RunPlanned,
    Start,
    StepStarted,
    UnitFinished,
    Written,
    encode_event,
)

SHOWN_UNITS = 8  # shows the latest ones
MIB = 1 << 20


class QuantizeDisplay(Protocol):
    """Shows events, and restores the terminal at the end."""

    def __enter__(self) -> QuantizeDisplay: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, event: QuantizeEvent) -> None: ...


def choose_display(*, as_json: bool) -> QuantizeDisplay:
    """Choose a display for standard error, or JSON lines on standard output."""
    if as_json:
        return JsonLines()
    console = Console(stderr=True)
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay()


class JsonLines:
    """One object per line on standard output; see `appliance.progress.quantize_events`."""

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __call__(self, event: QuantizeEvent) -> None:
        sys.stdout.write(encode_event(event).decode() + "\n")
        sys.stdout.flush()


class PlainDisplay:
    """Plain lines on standard error."""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __call__(self, event: QuantizeEvent) -> None:
        """Write an event's lines, except those that the command prints itself."""
        for line in _lines(event):
            sys.stderr.write(f"  {line}\n")
        sys.stderr.flush()


class TerminalDisplay:
    """A table of the latest layers with a bar below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._units: list[UnitFinished] = []

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: QuantizeEvent) -> None:
        """Redraw the table; print other events as lines above it."""
        if isinstance(event, UnitFinished):
            self._units.append(event)
            self._live.update(self._drawn(), refresh=True)
            lines = [f"note: {note}" for note in event.notes]
        else:
            lines = _lines(event)
        for line in lines:
            self._console.print(Text(f"  {line}"))

    def _drawn(self) -> Table:
        latest = self._units[-1]
        table = Table.grid(padding=(0, 2))
        for unit in self._units[-SHOWN_UNITS:]:
            table.add_row(f"  {unit.name}", _losses(unit), f"{unit.seconds:.1f} s")
        table.add_row(
            f"  {latest.done} of {latest.total}",
            ProgressBar(total=latest.bytes_total, completed=latest.bytes_done, width=40),
            f"{_duration(latest.remaining_seconds)} left",
        )
        table.add_row("  memory", _memory(latest), "")
        return table


def _lines(event: QuantizeEvent) -> list[str]:
    match event:
        case StepStarted():
            return [event.what]
        case RunEstimated():
            return [describe_time(event)]
        case Start(units_done=0):
            return [f"{event.architecture}, {event.method}, {event.scheme}: {_parts(event.units)}"]
        case Start():
            return [f"going on after {event.units_done} of {_parts(event.units)}"]
        case RunPlanned(measured=True):
            return describe_plan(event)
        case RunPlanned():
            return [f"note: {note}" for note in event.notes]
        case UnitFinished():
            losses = _losses(event)
            return [
                f"{event.name} ({event.done} of {event.total})"
                + (f": {losses}" if losses else "")
                + f", {event.seconds:.1f} s, {_duration(event.remaining_seconds)} left,"
                f" {_memory(event)}",
                *(f"note: {note}" for note in event.notes),
            ]
        case Written() | Done() | Measuring() | CardWritten() | RunFailed():
            return []


def describe_time(time: RunEstimated) -> str:
    """Format the time that a run will take, and by what."""
    parts = {"text": time.writing, "weights": time.weights, "card": time.card}
    said = ", ".join(f"{name} {_duration(value)}" for name, value in parts.items() if value)
    cores = "1 core" if time.cores == 1 else f"{time.cores} cores"
    return f"{time.method}, {time.form}: about {_duration(time.seconds)} on {cores} ({said})"


def _parts(count: int) -> str:
    return "1 part" if count == 1 else f"{count} parts"


def describe_plan(plan: RunPlanned) -> list[str]:
    gpu = f", {plan.peak_vram / MIB:,.0f} MiB on the GPU" if plan.peak_vram else ""
    size = sum(kind.nbytes for kind in plan.classes)
    return [
        *(
            f"{kind.count} {kind.tensors}: {kind.form}, {kind.nbytes / MIB:,.1f} MiB"
            for kind in plan.classes
        ),
        f"memory: {plan.peak_ram / MIB:,.0f} MiB at most{gpu}, as measured",
        f"disk: {size / MIB:,.1f} MiB, and {plan.disk_bytes / MIB:,.1f} MiB until the end",
        f"time: about {_duration(plan.seconds)}",
        *(f"note: {note}" for note in plan.notes),
    ]


def _losses(unit: UnitFinished) -> str:
    if not unit.losses:
        return ""
    worst = max(unit.losses.values())
    return f"loss {sum(unit.losses.values()) / len(unit.losses):.2e}, at most {worst:.2e}"


def _memory(unit: UnitFinished) -> str:
    shown = f"RAM {unit.ram / MIB:,.0f} MiB (most {unit.peak_ram / MIB:,.0f})"
    if unit.peak_vram:
        shown += f", VRAM {unit.vram / MIB:,.0f} MiB (most {unit.peak_vram / MIB:,.0f})"
    return shown


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"
