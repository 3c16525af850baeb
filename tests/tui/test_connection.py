"""The state of the connection, in place of the map or beside it."""

from __future__ import annotations

import msgspec
import pytest

from appliance.tui import palette
from appliance.tui.state import ConnectionPhase
from tests.tui.conftest import (
    CACHED,
    INFO,
    STATS,
    Answer,
    EventServer,
    snapshot,
)
from tests.tui.piloting import (
    LARGE,
    SMALL,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
    until,
)


async def test_a_lost_server_leaves_a_dim_picture_and_comes_back(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await event_server.stop()
        await shown(app, pilot, lambda: app.session.state.connection.phase is ConnectionPhase.LOST)
        assert "lost, retrying" in screen_text(app)
        await until(pilot, lambda: "Connection lost: " in screen_text(app))
        seen = block_map_colors(app)
        assert palette.dimmed(palette.owner_hue(1)) in seen
        assert palette.owner_hue(1) not in seen
        event_server.answers = [Answer((INFO, snapshot([CACHED] * 4096, epoch=1), STATS))]
        await event_server.start()
        await shown(app, pilot, lambda: app.session.state.current)
        await shown(
            app,
            pilot,
            lambda: app.session.state.blocks and app.session.state.blocks.counts().cached,
        )
        assert "● live" in screen_text(app)
        assert palette.CACHED in block_map_colors(app)


# Screens of either size show the message in the same widget as the map.
@pytest.mark.parametrize(
    ("size", "answer", "words"),
    [
        (
            SMALL,  # the longest words
            Answer(status="401 Unauthorized"),
            ["needs a key", "set APPLIANCE_API_KEY", "retrying"],
        ),
        (LARGE, Answer(status="403 Forbidden"), ["wants another key", "APPLIANCE_API_KEY"]),
        (
            SMALL,
            Answer(content_type="text/html"),
            ["is not an appliance", "200 text/html", "retrying"],
        ),
        (LARGE, Answer(), ["Connected", "waiting for the server"]),
        (
            LARGE,
            Answer((msgspec.structs.replace(INFO, state="loading"),)),
            ["SmolLM2-135M-Instruct is loading"],
        ),
        (
            SMALL,
            Answer((msgspec.structs.replace(INFO, state="failed", reason="no memory"),)),
            ["The engine failed", "no memory"],
        ),
    ],
)
async def test_what_is_wrong_stands_in_place_of_the_map(
    event_server: EventServer, size: tuple[int, int], answer: Answer, words: list[str]
) -> None:
    async with dashboard(event_server, size, answer) as (app, pilot):
        await shown(app, pilot, lambda: words[0] in screen_text(app))
        text = screen_text(app)
    for word in words:
        assert word in text


async def test_nobody_there(event_server: EventServer) -> None:
    await event_server.stop()
    async with dashboard(event_server, SMALL, Answer()) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.connection.phase is ConnectionPhase.LOST)
        text = screen_text(app)
    assert f"No connection to {event_server.url}" in text
    assert "connection refused; is the server running?" in text


async def test_a_restarting_engine_is_told_and_its_old_map_dimmed(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server) as (app, pilot):
        event_server.send(msgspec.structs.replace(INFO, state="restarting", restarts=1))
        await shown(app, pilot, lambda: not app.session.state.current)
        assert "restarting · restarted once" in screen_text(app)
        assert palette.owner_hue(1) not in block_map_colors(app)
