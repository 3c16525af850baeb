"""The page of the map: zoom, cursor, minimap, block table."""

from __future__ import annotations

import msgspec
import pytest

from appliance.tui import palette
from appliance.tui.raster import ColorMode
from appliance.tui.screens.map import MapScreen
from appliance.tui.widgets.block_map import BlockMap
from tests.tui.conftest import (
    FREE,
    INFO,
    STATS,
    Answer,
    EventServer,
    active,
    page,
    sequences,
    snapshot,
)
from tests.tui.piloting import (
    LARGE,
    SEQUENCES,
    SMALL,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
    until,
)
from tests.tui.test_controls import TABLE

MANY = Answer((INFO, snapshot([active(1)] * 20_000 + [FREE] * 45_536), SEQUENCES, STATS))


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_zoom_goes_from_all_blocks_to_letters_and_back(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size, MANY) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("2")
        await shown(app, pilot, lambda: isinstance(app.screen, MapScreen))
        assert "all blocks; + looks closer" in screen_text(app)
        await pilot.press(*["plus"] * 9)
        await shown(app, pilot)
        block_map = app.screen.query_one(BlockMap)
        port = block_map.viewport(app.session.view())
        assert port.lettered
        assert len(port.span) == block_map.size.area
        assert app.session.look.cursor in port.span
        text = screen_text(app)
        assert f"KV blocks by owner, {port.span.start:,} to {port.span.stop - 1:,}" in text
        assert "◆ block 32,768 · free" in text
        assert "." * 20 in text, "a letter for each free block"
        assert ". free " in text, "and what it means"
        await pilot.press(*["minus"] * 9)
        await shown(app, pilot)
        assert "all blocks; + looks closer" in screen_text(app)


async def test_the_cursor_tells_what_is_under_it(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("2", "plus", "plus", "plus")
        app.session.change(cursor=600)
        await shown(app, pilot)
        text = screen_text(app)
        assert "◆ block 600 · active · chatcmpl-1 of anna · 1 reference · int8 · changed" in text
        await pilot.press("right")
        await shown(app, pilot)
        assert "◆ block 601 · " in screen_text(app)
        assert palette.CURSOR in block_map_colors(app)
        await pilot.press("enter")
        assert app.session.look.focus is not None
        assert app.session.look.focus.request_id == "chatcmpl-1"
        for _ in range(3):
            await pilot.press("escape")
        assert app.session.look.cursor is None
        assert app.session.look.level == 0


async def test_the_cursor_stays_on_the_map(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("2", "plus")
        last = 4095
        for key in ("left", "right", "up", "down"):
            app.session.change(cursor=2 if key in {"left", "up"} else last - 2)
            await pilot.press(*[key] * 4)
            assert app.session.look.cursor is not None
            assert 0 <= app.session.look.cursor <= last, key


async def test_the_block_table_of_the_focus_is_asked_for_and_shown(
    event_server: EventServer,
) -> None:
    path = "/admin/v1/sequences/chatcmpl-1/0/blocks"
    event_server.pages[path] = page(msgspec.json.encode(TABLE))
    async with dashboard(event_server) as (app, pilot):
        assert not any(path in request for request in event_server.requests)
        await pilot.press("2", "tab")
        await shown(app, pilot, lambda: app.session.state.table)
        lines = [" ".join(line.split()) for line in screen_text(app).splitlines()]
        assert any("0 7 2 abababab int8" in line for line in lines)
        assert any("2 8 1 open int8" in line for line in lines)
        # The blocks of the table are highlighted, whoever took them last.
        assert app.session.view().emphasis.table == {7, 8, 9}


async def test_without_a_block_table_the_map_tells_what_it_can(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("2", "tab")
        await shown(app, pilot)
        assert "taken by it, in physical order" in screen_text(app)
        assert "512 to 1,023" in screen_text(app)


async def test_a_click_puts_the_cursor_there(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("2")
        await pilot.click(BlockMap, offset=(0, 0))
        assert app.session.look.cursor == 0


async def test_every_mode_has_a_legend(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("2")
        for mode, words in {
            ColorMode.OWNER: "owned 1,024",
            ColorMode.STATE: "active 1,024",
            ColorMode.REFERENCES: "used by ■ 1 ■ 2 ■ 3-4 ■ 5-8 ■ 9+",
            ColorMode.PRECISION: "int8 2,048",
            ColorMode.AGE: "changed ■ <1 s ■ <10 s ■ <1 min ■ <10 min ■ older",
            ColorMode.ADAPTER: "no adapter 1,536",
        }.items():
            app.session.change(mode=mode)
            await shown(app, pilot)
            assert words in screen_text(app)
            assert f"KV blocks by {mode.value}" in screen_text(app)


async def test_blocks_are_coloured_by_the_adapter_of_their_sequence(
    event_server: EventServer,
) -> None:
    first, *others = SEQUENCES.sequences
    adapted = sequences(msgspec.structs.replace(first, adapter="sql"), *others)
    cells = [active(first.slot)] * 3 + [active(first.slot + 1)] * 2 + [FREE] * 3
    answer = Answer((INFO, snapshot(cells), adapted, STATS))
    async with dashboard(event_server, LARGE, answer) as (app, pilot):
        await pilot.press("2")
        app.session.change(mode=ColorMode.ADAPTER)
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
        assert "no adapter 2" in text
        assert "sql 3" in text
        assert palette.OWNER_HUES[0] in block_map_colors(app)


async def test_nothing_to_look_at(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, Answer((INFO,))) as (app, pilot):
        await pilot.press("2", "plus", "right", "enter", "minus")
        await shown(app, pilot)
        assert "waiting for the first block map" in screen_text(app)
        assert palette.CACHED not in block_map_colors(app)
