"""Every screen against its approved snapshot: delete a file to approve it anew.

Snapshots of the smallest size include colours: a letter for the style of each cell, below the text.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from appliance.events import Event, Gpu, Job, Log, LogLine, Machine, QualityFact
from appliance.stats import StepView
from appliance.tui.terminal import Colors, DisplaySettings
from tests.tui.conftest import INFO, STATS, Answer, EventServer, page, sequence, sequences, snapshot
from tests.tui.piloting import (
    CELLS,
    LARGE,
    SMALL,
    TRUECOLOR,
    dashboard,
    screen_strips,
    screen_text,
    shown,
)
from tests.tui.test_controls import TABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rich.style import Style

    from appliance.tui.app import DashboardApp

APPROVED = Path(__file__).parent / "snapshots"
HUGE = (240, 67)
SIZES = pytest.mark.parametrize(
    "size", [SMALL, LARGE, HUGE], ids=lambda size: "x".join(map(str, size))
)
MACHINE = Machine(
    cpu_cores=16, cpu_used=5.5, engine_rss_bytes=3 * 2**30, api_rss_bytes=2**27,
    memory_total_bytes=64 * 2**30, memory_available_bytes=20 * 2**30,
)  # fmt: skip
GPU = Gpu(
    name="RTX 4090", utilization=0.93, memory_used_bytes=20 * 2**30,
    memory_total_bytes=24 * 2**30, power_watts=312.0, power_limit_watts=450.0,
    temperature_celsius=71.0, sm_clock_mhz=2520, throttled=("power cap",), joules_per_token=0.42,
)  # fmt: skip
JOB = Job(
    name="quantize Qwen3-8B", stage="quantizing", done=3, total=36, seconds_left=75.0,
    part="layer 2", parts_done=4, parts_total=38, loss=0.01234,
)  # fmt: skip
STEPS = (StepView(1, 384, 2, 3, 0.02), StepView(2, 0, 3, 3, 0.01))
TIERS = msgspec.structs.replace(
    STATS.engine,
    swaps_total=3, swapped=1, swapped_out_total=96, swapped_in_total=60,
    kv_host_blocks=40, kv_host_swapped=36, kv_host_capacity=256,
    prefix_hits_host_total=48, prefix_hits_disk_total=160, kv_disk_writing=True,
    kv_disk_blocks=700, kv_disk_bytes=2**29, kv_disk_capacity_bytes=2**32, kv_disk_pending=12,
    kv_disk_written_total=650, kv_disk_read_total=100, kv_disk_evicted_total=3,
)  # fmt: skip
NUMBERS = msgspec.structs.replace(STATS, engine=TIERS, machine=MACHINE, steps=STEPS)
ALL: tuple[Event, ...] = (
    msgspec.structs.replace(
        INFO,
        memory_bytes=8 * 2**30,
        workspace_bytes=2**28,
        quality=(QualityFact(name="perplexity", value=11.53, note="WikiText"),),
    ),
    snapshot(CELLS),
    sequences(
        sequence(1, tokens_per_second=12.5, computed_tokens=1300),
        sequence(2, owner="codex", output_tokens=9),
        sequence(0, "waiting", request_id="cmpl-next", blocks=0, prompt_tokens=300),
        sequence(
            0,
            "swapped",
            request_id="chatcmpl-9",
            blocks=0,
            kept_tokens=590,
            host_blocks=36,
            preemptions=1,
            age_seconds=9.0,
        ),
    ),
    Log(lines=(LogLine(time=0.0, level="ERROR", source="engine", message="out of luck"),)),
    NUMBERS,
)
WITH_GPU: tuple[Event, ...] = (
    *ALL,
    JOB,
    msgspec.structs.replace(NUMBERS, machine=msgspec.structs.replace(MACHINE, gpus=(GPU,))),
)


@dataclass(frozen=True)
class Screen:
    """A screen, and the keys that lead to it from the one before."""

    name: str
    keys: str
    changes: dict[str, object] = field(default_factory=dict)  # to the person's view


SCREENS = (
    Screen("overview", "1"),
    Screen("requests", "3"),
    Screen("filter", "slash c o d e x enter"),
    Screen("model", "4"),
    Screen("log", "5"),
    Screen("help", "question_mark"),
    Screen("request", "escape 3 escape"),
    Screen("detail", "tab"),
    Screen("abort", "x"),
    Screen("map", "escape 2"),
    Screen("state", "c"),
    Screen("references", "c"),
    Screen("precision", "c"),
    Screen("zoomed", "c c c plus plus plus plus plus plus", {"cursor": 1030}),
)


@SIZES
async def test_every_screen_looks_as_approved(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    found = [one async for one in Tour(event_server, monkeypatch, ALL).looks(size, SCREENS)]
    check(found, size)


@SIZES
@pytest.mark.parametrize(
    ("events", "screens", "display"),
    [
        (WITH_GPU, (Screen("gpu", "1"), Screen("task", "4")), TRUECOLOR),
        (
            ALL,
            (Screen("letters", "1"), Screen("letters-focus", "3 tab")),
            DisplaySettings(Colors.NONE),
        ),
    ],
    ids=["gpu", "letters"],
)
async def test_other_servers_and_terminals_look_as_approved(
    event_server: EventServer,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    events: tuple[Event, ...],
    screens: tuple[Screen, ...],
    display: DisplaySettings,
) -> None:
    tour = Tour(event_server, monkeypatch, events, display)
    check([one async for one in tour.looks(size, screens)], size)


class Tour:
    """A walk through the dashboard of one server."""

    def __init__(
        self,
        server: EventServer,
        monkeypatch: pytest.MonkeyPatch,
        events: tuple[Event, ...],
        display: DisplaySettings = TRUECOLOR,
    ) -> None:
        monkeypatch.setattr("appliance.tui.screens.facts.time.localtime", lambda when: (0,) * 9)
        monkeypatch.setattr("appliance.tui.client.SILENCE_TIMEOUT", 600.0)  # for a slow machine
        server.pages["/admin/v1/sequences/chatcmpl-1/0/blocks"] = page(msgspec.json.encode(TABLE))
        self._server, self._answer, self._display = server, Answer(events), display

    async def looks(
        self, size: tuple[int, int], screens: tuple[Screen, ...]
    ) -> AsyncIterator[tuple[str, str]]:
        """Name and content of each screen in turn."""
        async with dashboard(self._server, size, self._answer, display=self._display) as opened:
            app, pilot = opened
            await shown(app, pilot, lambda: app.session.state.stats)
            for screen in screens:
                await pilot.press(*screen.keys.split())
                if screen.changes:
                    app.session.change(**screen.changes)
                if app.session.look.focus is not None:
                    await shown(app, pilot, lambda: app.session.state.table)
                await shown(app, pilot)
                await pilot.pause(0.1)
                yield screen.name, self._look(app, with_styles=size == SMALL)

    def _look(self, app: DashboardApp, *, with_styles: bool) -> str:
        text = screen_text(app).replace(self._server.url, "http://127.0.0.1:8080".ljust(20))
        text = re.sub(r"changed \d[^│]*", lambda found: "changed".ljust(len(found[0])), text)
        lines = [line.rstrip() for line in text.splitlines()]
        return "\n".join([*lines, *(styles_of(app) if with_styles else ())]) + "\n"


def styles_of(app: DashboardApp) -> Iterator[str]:
    """The screen with a letter for the style of each cell, and then the meaning of the letters."""
    letters: dict[str, str] = {}
    alphabet = iter(string.ascii_letters + string.digits)
    for strip in screen_strips(app):
        line = ""
        for segment in strip:
            # A space shows only its background.
            style = described(segment.style, inked=bool(segment.text.strip()))
            if style not in letters:
                letters[style] = next(alphabet)
            line += letters[style] * segment.cell_length
        yield line
    yield from (f"{letter} {style}" for style, letter in letters.items())


def described(style: Style | None, *, inked: bool) -> str:
    """Describe a style in words."""
    assert style is not None
    ground = style.bgcolor.name if style.bgcolor else "nothing"
    if not inked and not style.reverse:
        return f"on {ground}"
    words = [style.color.name if style.color else "plain", "on", ground]
    words += [word for word in ("bold", "reverse") if getattr(style, word)]
    return " ".join(words)


def check(looks: list[tuple[str, str]], size: tuple[int, int]) -> None:
    """Compare with the approved snapshots; write a new one, which must be looked at."""
    new, other = [], []
    for name, look in looks:
        approved = APPROVED / f"{name}-{'x'.join(map(str, size))}.txt"
        if not approved.exists():
            approved.parent.mkdir(exist_ok=True)
            approved.write_text(look)
            new.append(approved.name)
        elif look != approved.read_text():
            other.append((look, approved))
    assert not new, f"{new} were not there: look at them, then run again"
    for look, approved in other:
        assert look == approved.read_text(), approved.name
