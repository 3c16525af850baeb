"""The whole dashboard with a server on loopback, read from the screen's own cells."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from appliance.tui.app import DashboardApp
from appliance.tui.client import EventFeed
from appliance.tui.controls import Controls
from appliance.tui.server import Server
from appliance.tui.terminal import Colors, DisplaySettings
from appliance.tui.widgets.block_map import BlockMap
from tests.tui.conftest import (
    CACHED,
    FREE,
    INFO,
    STATS,
    Answer,
    EventServer,
    active,
    sequence,
    sequences,
    snapshot,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.app import App
    from textual.pilot import Pilot
    from textual.strip import Strip

TRUECOLOR = DisplaySettings(Colors.TRUECOLOR)
LARGE, SMALL = (160, 48), (80, 24)
# Two sequences, a prefix that they share, and cached blocks of earlier sequences.
CELLS = [
    *[active(2, 2)] * 512,
    *[active(1)] * 512,
    *[active(2)] * 512,
    *[CACHED] * 512,
    *[FREE] * 2048,
]
SEQUENCES = sequences(
    sequence(1),
    sequence(2, owner="codex", output_tokens=9),
    sequence(0, "waiting", request_id="cmpl-next", blocks=0, prompt_tokens=300),
)
EVERYTHING = Answer((INFO, snapshot(CELLS), SEQUENCES, STATS))
THREE = sequences(
    sequence(1, owner="anna", output_tokens=5, tokens_per_second=9.0, age_seconds=50.0),
    sequence(2, owner="codex", output_tokens=900, tokens_per_second=40.0, age_seconds=40.0),
    sequence(3, owner="anna", output_tokens=70, tokens_per_second=2.0, age_seconds=30.0),
)
WITH_THREE = Answer((INFO, snapshot(CELLS), THREE, STATS))


@asynccontextmanager
async def dashboard(
    server: EventServer,
    size: tuple[int, int] = LARGE,
    *answers: Answer,
    display: DisplaySettings = TRUECOLOR,
) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
    server.answers = list(answers) or [EVERYTHING]
    there = Server.at(server.url, None)
    app = DashboardApp(
        EventFeed(there, first_retry=0.05), controls=Controls(there), display=display
    )
    async with app.run_test(size=size, notifications=True) as pilot:
        if not answers:
            await shown(app, pilot, lambda: app.session.state.stats)
        yield app, pilot


async def until(pilot: Pilot[None], happened: Callable[[], object]) -> None:
    """Wait until something happened."""
    for _ in range(500):
        if happened():
            return
        await pilot.pause(0.01)
    pytest.fail("it never happened")


async def shown(
    app: DashboardApp, pilot: Pilot[None], happened: Callable[[], object] = lambda: True
) -> None:
    """Wait until something happened and the screen shows it."""
    await until(pilot, happened)
    app.paint()
    await pilot.pause()


def screen_strips(app: App[None]) -> list[Strip]:
    """The lines of the screen behind the filters, as a terminal gets them."""
    # Textual exports its screen only as a picture (`export_screenshot`).
    return app.screen._compositor.render_strips()


def screen_text(app: DashboardApp) -> str:
    return "\n".join(strip.text for strip in screen_strips(app))


def block_map_colors(app: DashboardApp) -> dict[str, int]:
    """How many pixels of the block map have which colour."""
    block_map = app.screen_stack[0].query_one(BlockMap)
    counts: dict[str, int] = {}
    for y in range(block_map.size.height):
        for segment in block_map.render_line(y):
            style = segment.style
            assert style is not None
            assert style.bgcolor is not None
            lower = style.bgcolor.name
            upper = style.color.name if style.color is not None else lower
            for color in (upper, lower):
                counts[color] = counts.get(color, 0) + segment.cell_length
    return counts
