"""When the screen is painted, and how much of it is."""

from __future__ import annotations

import pytest
from textual.geometry import Region
from textual.widget import Widget

from appliance.events import BlockRun, Delta
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
    screen_strips,
    screen_text,
    shown,
    until,
)


async def test_deltas_change_what_is_shown(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        before = app.session.state
        event_server.send(Delta(epoch=1, runs=(BlockRun(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.session.state is not before)
        assert set(block_map_colors(app)) <= {palette.CACHED, palette.BACKGROUND}
        assert "cached 4,096" in screen_text(app)


class Written:
    """A terminal that records what is written to it."""

    def __init__(self) -> None:
        self.sequences: list[str] = []

    def write(self, data: str) -> None:
        self.sequences.append(data)


async def test_only_what_changed_is_painted(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DashboardApp, "paint_frame", lambda app: None)  # no frame is due in between
    async with dashboard(event_server) as (app, pilot):
        written = Written()
        app.terminal = written  # type: ignore[assignment]
        app.paint()
        assert not written.sequences, "nothing is new"
        before = app.session.state
        event_server.send(Delta(epoch=1, runs=(BlockRun(2100, 1, active(1)),)))
        await until(pilot, lambda: app.session.state is not before)
        app.paint(panels=False)
    (sent,) = written.sequences
    hue = ";".join(str(int(palette.owner_hue(1)[at : at + 2], 16)) for at in (1, 3, 5))
    assert hue in sent
    assert len(sent) < 200


async def test_what_was_sent_by_the_short_way_is_painted_by_the_long_way_too(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server) as (app, pilot):
        app.terminal = Written()  # type: ignore[assignment]
        assert palette.WRITING not in block_map_colors(app)
        before = app.session.state
        event_server.send(Delta(epoch=1, runs=(BlockRun(2048, 2048, active(1)),)))
        await until(pilot, lambda: app.session.state is not before)
        app.paint()  # no screen update comes after this
        area = app.screen.query_one(BlockMap).region
        lower = screen_strips(app)[area.bottom - 2].crop(area.x, area.right)
        assert {one.style.bgcolor.name for one in lower if one.style and one.style.bgcolor} <= {
            palette.owner_hue(1),
            palette.BACKGROUND,
        }


async def test_what_lies_over_the_map_is_not_painted_over(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        written = Written()
        app.terminal = written  # type: ignore[assignment]
        app.notify("something to read")
        await until(pilot, lambda: app.screen.query("Toast"))
        before = app.session.state
        event_server.send(Delta(epoch=1, runs=(BlockRun(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.session.state is not before)
        assert "something to read" in screen_text(app)
        assert "cached 4,096" in screen_text(app)
        assert not written.sequences


async def test_nothing_is_painted_while_nothing_changes(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted: list[Widget] = []
    refresh = Widget.refresh

    def counted(widget: Widget, *regions: Region, **how: bool) -> Widget:
        painted.append(widget)
        return refresh(widget, *regions, **how)

    def settled() -> bool:
        was_painted = bool(painted)
        painted.clear()
        return not was_painted

    monkeypatch.setattr(Widget, "refresh", counted)
    async with dashboard(event_server) as (app, pilot):
        for page in ("overview", "map", "requests", "model", "log"):
            await app.switch_mode(page)
            await shown(app, pilot)
            await until(pilot, settled)  # a screen's first footer appears a little later
            for _ in range(3):
                app.paint()
                await pilot.pause()
            assert not painted, page


async def test_under_a_question_the_page_goes_on(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab", "x")
        before = app.session.state
        event_server.send(Delta(epoch=1, runs=(BlockRun(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.session.state is not before)
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
        await shown(app, pilot, lambda: app.session.state.stats)
    app.paint()
