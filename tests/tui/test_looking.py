"""The keys and the mouse on the first page."""

from __future__ import annotations

import pytest

from appliance.events import BlockRun, Delta
from appliance.tui import palette
from appliance.tui.screens.help import HelpScreen
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.requests import RequestTable
from tests.tui.conftest import (
    CACHED,
    EventServer,
    sequence,
    sequences,
)
from tests.tui.piloting import (
    SMALL,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
)


async def test_colour_modes(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        seen = block_map_colors(app)
        assert {palette.ACTIVE, palette.SHARED, palette.CACHED, palette.FREE} <= set(seen)
        assert palette.owner_hue(1) not in seen
        assert "KV blocks by state" in screen_text(app)
        assert "active 1,024" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        seen = block_map_colors(app)
        assert seen[palette.REFERENCE_STEPS[0]] > seen[palette.REFERENCE_STEPS[1]] > 0
        assert palette.SHARED not in seen
        assert "KV blocks by references" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        assert {palette.owner_hue(0), palette.FREE} == set(block_map_colors(app)) - {
            palette.BACKGROUND
        }
        assert "KV blocks by precision" in screen_text(app)
        assert "int8 2,048" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        seen = block_map_colors(app)
        assert {palette.AGE_STEPS[0], palette.FREE} & set(seen)
        assert "KV blocks by age" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        assert "KV blocks by adapter" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        assert "KV blocks by owner" in screen_text(app)
        assert palette.owner_hue(1) in block_map_colors(app)


async def test_focus_dims_the_others_and_follows_the_keys(event_server: EventServer) -> None:
    first, second = palette.owner_hue(1), palette.owner_hue(2)
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab")
        await pilot.pause()
        seen = block_map_colors(app)
        assert first in seen
        assert palette.dimmed(second) in seen
        assert {second, palette.FREE, palette.CACHED}.isdisjoint(seen)
        assert "▸■ chatcmpl-1" in screen_text(app)

        await pilot.press("down")
        await pilot.pause()
        seen = block_map_colors(app)
        # The second sequence took the shared blocks last, so they are highlighted with it.
        assert {second, palette.SHARED} <= set(seen)
        assert first not in seen

        await pilot.press("down")
        await pilot.pause()
        assert "▸■ cmpl-next" in screen_text(app)
        assert {first, second, palette.SHARED}.isdisjoint(block_map_colors(app))

        await pilot.press("up", "shift+tab")
        await pilot.pause()
        assert "▸■ chatcmpl-1" in screen_text(app)

        await pilot.press("escape")
        await pilot.pause()
        assert {first, second, palette.FREE} <= set(block_map_colors(app))


async def test_focus_ends_with_its_sequence(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("down")
        event_server.send(sequences(sequence(2)))
        await shown(app, pilot, lambda: len(app.session.state.sequences) == 1)
        assert "▸" not in screen_text(app)
        assert palette.FREE in block_map_colors(app)


async def test_a_click_on_a_block_or_a_line_focuses_its_sequence(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        block_map = app.screen.query_one(BlockMap)
        await pilot.click(BlockMap, offset=(5, block_map.size.height * 3 // 16))
        await pilot.pause()
        assert "▸■ chatcmpl-1" in screen_text(app)
        await pilot.click(BlockMap, offset=(5, block_map.size.height * 3 // 4))  # free
        await pilot.pause()
        assert "▸" not in screen_text(app)
        # Inside the border: a line, its heading, then the second sequence.
        await pilot.click(RequestTable, offset=(9, 3))
        await pilot.pause()
        assert "▸■ chatcmpl-2" in screen_text(app)


async def test_pause_holds_the_picture(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("p")
        event_server.send(Delta(epoch=1, runs=(BlockRun(0, 4096, CACHED),)))
        before = app.session.state
        await shown(app, pilot, lambda: app.session.state is not before)
        assert "‖ paused" in screen_text(app)
        assert palette.owner_hue(1) in block_map_colors(app)
        await pilot.press("p")
        await pilot.pause()
        assert "● live" in screen_text(app)
        assert palette.owner_hue(1) not in block_map_colors(app)


async def test_help(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        assert "focus the next or previous sequence, all others dimmed" in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
        assert not isinstance(app.screen, HelpScreen)
        assert app.is_running


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_quitting_ends_the_feed(event_server: EventServer, key: str) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running
    assert app.return_code == 0
