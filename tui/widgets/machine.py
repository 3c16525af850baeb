"""The machine's load: its GPUs, or the server's processor and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import HEADLINE, Panel, pair

if TYPE_CHECKING:
    from rich.text import Text

    from appliance.events import Gpu, Machine
    from appliance.tui.view import View


_FULL = 4  # lines of `gpu_lines`


class MachinePanel(Panel):
    TITLE = "Machine"
    DEFAULT_CSS = "MachinePanel { height: 6; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return (view.state.stats,)

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw GPUs, or processor and memory if there are none."""
        stats = view.state.stats
        if stats is None or stats.machine is None:
            return [pair("not sent by this server", "", width)]
        machine = stats.machine
        if not machine.gpus:
            return machine_lines(machine, width)
        each = max(1, height // len(machine.gpus))
        short = _short_lines if each < _FULL else gpu_lines
        return [line for gpu in machine.gpus for line in short(gpu, width)[:each]]


def machine_lines(machine: Machine, width: int) -> list[Text]:
    cores = f"of {numbers.counted(machine.cpu_cores, 'core')}" if machine.cpu_cores else "cores"
    free = numbers.size(machine.memory_available_bytes)
    total = f"of {numbers.size(machine.memory_total_bytes)}"
    return [
        pair("CPU", f"{machine.cpu_used:.1f}", width, note=cores, color=HEADLINE),
        pair("engine memory", numbers.size(machine.engine_rss_bytes), width, note="RSS"),
        pair("API memory", numbers.size(machine.api_rss_bytes), width, note="RSS"),
        *([pair("free memory", free, width, note=total)] if machine.memory_total_bytes else []),
    ]


def _short_lines(gpu: Gpu, width: int) -> list[Text]:
    """Draw one GPU in two lines, if several share the space."""
    busy = "-" if gpu.utilization is None else f"{gpu.utilization:.0%}"
    held = ", ".join(gpu.throttled)
    facts = (
        "" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
        "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C",
        held,
    )
    used = "-" if gpu.memory_used_bytes is None else numbers.size(gpu.memory_used_bytes)
    color = palette.WARNING if held else palette.TEXT
    note = "  ".join(filter(None, facts))
    return [
        pair(gpu.name, busy, width, color=HEADLINE),
        pair("memory", used, width, note=note, color=color),
    ]


def gpu_lines(gpu: Gpu, width: int) -> list[Text]:
    """Draw all facts about one GPU."""
    busy = "-" if gpu.utilization is None else f"{gpu.utilization:.0%}"
    energy = "" if gpu.joules_per_token is None else f"{gpu.joules_per_token:.2f} J/token"
    lines = [pair(gpu.name, busy, width, note=energy, color=HEADLINE)]
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes is not None:
        of = f"of {numbers.size(gpu.memory_total_bytes)}"
        lines.append(pair("memory", numbers.size(gpu.memory_used_bytes), width, note=of))
    heat = "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C"
    if gpu.power_watts is not None:
        limit = f"of {gpu.power_limit_watts:.0f} W" if gpu.power_limit_watts else ""
        words = f"{gpu.power_watts:.0f} W  {heat}".rstrip()
        lines.append(pair("power", words, width, note=limit))
    elif heat:  # laptops and small cards report no power
        lines.append(pair("temperature", heat, width))
    clock = "-" if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz:,} MHz"
    held = ", ".join(gpu.throttled)
    color = palette.WARNING if held else palette.TEXT
    lines.append(pair("clock", clock, width, note=f"limit: {held}" if held else "", color=color))
    return lines
