"""The dashboard aborts a request, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.tui.app import DashboardApp
from appliance.tui.recording import Recorder, ReplayFeed
from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.state import ConnectionChange, ConnectionPhase
from tests.tui.conftest import (
    INFO,
    STATS,
    Answer,
    EventServer,
    page,
    sequence,
    sequences,
    snapshot,
)
from tests.tui.piloting import (
    CELLS,
    LARGE,
    SMALL,
    THREE,
    WITH_THREE,
    dashboard,
    screen_text,
    shown,
    until,
)


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_a_request_is_aborted_after_a_question(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    path = "/admin/v1/requests/chatcmpl-1/abort"
    event_server.pages[path] = page(b'{"aborted": true}')
    async with dashboard(event_server, size) as (app, pilot):
        await pilot.press("x")
        await shown(app, pilot, lambda: "Choose a request first" in screen_text(app))
        await pilot.press("tab", "x")
        await shown(app, pilot)
        assert "Abort chatcmpl-1 of anna?" in screen_text(app)
        await pilot.press("n")
        await pilot.pause()
        assert not any(path in request for request in event_server.requests)
        await pilot.press("x", "y")
        await until(pilot, lambda: "Aborted chatcmpl-1" in screen_text(app))
        assert sum(path in request for request in event_server.requests) == 1


def told(app: DashboardApp) -> str:
    """The words of the newest message, without its line breaks."""
    toasts = list(app.screen.query("Toast"))
    area = toasts[-1].outer_size.region
    lines = (strip.text.strip(" ▌") for strip in toasts[-1].render_lines(area))
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize(
    ("request_id", "words"),
    [
        ("chatcmpl-1", ("Not yours: this request is of anna.", "APPLIANCE_API_KEY")),
        ("r" * 200, ("Not yours", "any.")),
    ],
)
async def test_why_a_request_cannot_be_aborted_comes_before_the_question(
    event_server: EventServer, size: tuple[int, int], request_id: str,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    theirs = sequences(sequence(1, request_id=request_id, yours=False))
    of_others = Answer((INFO, snapshot(CELLS), theirs, STATS))
    async with dashboard(event_server, size, of_others) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab", "x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert isinstance(app.screen, DashboardScreen), "no question"
        for word in words:
            assert word in told(app)


async def test_a_request_that_has_ended_is_said_to_have_ended(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL, WITH_THREE) as (app, pilot):
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab")
        event_server.send(sequences(sequence(2)))
        await shown(app, pilot, lambda: len(app.session.state.sequences) == 1)
        await pilot.press("x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert told(app).startswith("It has ended: chatcmpl-1")
        assert told(app).endswith("cannot be aborted any more.")
        await pilot.press("tab", "p")
        event_server.send(sequences())
        await until(pilot, lambda: not app.session.state.sequences)
        await pilot.press("x")
        await until(pilot, lambda: "It has ended since" in told(app))
        assert "chatcmpl-2" in told(app)
        await event_server.stop()
        await until(pilot, lambda: app.session.state.connection.phase is ConnectionPhase.LOST)
        await pilot.press("x")
        await until(pilot, lambda: "No connection" in told(app))


async def test_in_a_recording_nothing_can_be_aborted(tmp_path: Path) -> None:
    path = tmp_path / "feed"
    recorder = Recorder(path, "box")
    for event in (ConnectionChange(ConnectionPhase.LIVE), INFO, snapshot(CELLS), THREE, STATS):
        recorder.write(event)
    recorder.close()
    app = DashboardApp(ReplayFeed(path))
    async with app.run_test(notifications=True) as pilot:
        await until(pilot, lambda: app.session.state.stats)
        await pilot.press("tab", "x")
        await until(pilot, lambda: app.screen.query("Toast"))
        await pilot.pause()
        assert told(app) == "A recording: it has nothing to abort."


async def test_a_refused_abort_is_told(event_server: EventServer) -> None:
    path = "/admin/v1/requests/chatcmpl-1/abort"
    event_server.pages[path] = page(b'{"error": {"message": "it has ended"}}', "404 Not Found")
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab", "x", "y")
        await until(pilot, lambda: "Not aborted: it has ended" in screen_text(app))
