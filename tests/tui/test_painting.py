"""When the screen is painted, and how much of it."""

from __future__ import annotations

import pytest

from appliance.events import Delta, Run
from appliance.tui import palette
from appliance.tui.app import DashboardApp
from appliance.tui.client import EventFeed
from appliance.tui.server import Server
from appliance.tui.widgets.block_map import BlockMap
from tests.tui.conftest import (
    CACHED,
    EventServer,
    active,
)
from tests.tui.piloting import (
    EVERYTHING,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
    until,
)


async def test_deltas_change_what_is_shown(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.state is not before)
        assert set(block_map_colors(app)) <= {palette.CACHED, palette.BACKGROUND}
        assert "cached 4,096" in screen_text(app)


async def test_only_what_changed_is_painted(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DashboardApp, "_frame", lambda app: None)  # no frame falls due between
    async with dashboard(event_server) as (app, pilot):
        sent: list[str] = []
        monkeypatch.setattr(
            app, "_display", lambda screen, update: sent.append(update.render_segments(app.console))
        )
        app.paint()
        assert not sent, "nothing is new"
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(2100, 1, active(1)),)))
        await until(pilot, lambda: app.state is not before)
        app.paint(panels=False)
    (written,) = sent
    hue = ";".join(str(int(palette.owner_hue(1)[at : at + 2], 16)) for at in (1, 3, 5))
    assert hue in written
    assert len(written) < 200


async def test_what_was_sent_by_the_short_way_is_painted_by_the_long_way_too(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server) as (app, pilot):
        assert palette.WRITING not in block_map_colors(app)
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(2048, 2048, active(1)),)))
        await until(pilot, lambda: app.state is not before)
        app.paint()  # no screen update comes after this
        strips = app.screen._compositor.render_strips()
        area = app.screen.query_one(BlockMap).region
        lower = strips[area.bottom - 2].crop(area.x, area.right)
        assert {one.style.bgcolor.name for one in lower if one.style and one.style.bgcolor} <= {
            palette.owner_hue(1),
            palette.BACKGROUND,
        }


async def test_under_a_question_the_page_goes_on(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab", "x")
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.state is not before)
        assert "Abort chatcmpl-1 of anna?" in screen_text(app)
        await pilot.press("n")
        await pilot.pause()
        assert "cached 4,096" in screen_text(app)


async def test_a_frame_may_fall_due_before_the_start_and_after_the_end(
    event_server: EventServer,
) -> None:
    event_server.answers = [EVERYTHING]
    app = DashboardApp(EventFeed(Server.at(event_server.url, None)))
    app.paint()
    async with app.run_test() as pilot:
        await shown(app, pilot, lambda: app.state.stats)
    app.paint()
