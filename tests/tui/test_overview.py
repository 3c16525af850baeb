"""The first page at several sizes."""

from __future__ import annotations

import pytest

from appliance.tui import palette
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.panel import Panel
from tests.tui.conftest import (
    INFO,
    STATS,
    Answer,
    EventServer,
    sequence,
    sequences,
    snapshot,
)
from tests.tui.piloting import (
    CELLS,
    LARGE,
    SMALL,
    block_map_colors,
    dashboard,
    screen_text,
    shown,
)


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_the_map_shows_owners_and_what_they_share(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size) as (app, _):
        seen = block_map_colors(app)
    area = sum(seen.values())
    # An eighth is shared, an eighth belongs to each sequence, an eighth is cached, half is free.
    for color, share in {
        palette.SHARED: 1 / 8,
        palette.owner_hue(1): 1 / 8,
        palette.owner_hue(2): 1 / 8,
        palette.CACHED: 1 / 8,
        palette.FREE: 1 / 2,
    }.items():
        assert seen.pop(color) / area == pytest.approx(share, abs=0.03)
    assert set(seen) <= {palette.BACKGROUND}
    assert seen.get(palette.BACKGROUND, 0) / area < 0.02


async def test_a_large_terminal_shows_everything(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, _):
        text = screen_text(app)
        assert all(len(line) == 160 for line in text.splitlines())
        assert len(text.splitlines()) == 48
    for words in (
        "SmolLM2-135M-Instruct · 4-bit packed (g32) · KV int8",
        "● live",
        "up 1:02:05",
        "KV blocks by owner",
        "free 2,048",
        "cached 512",
        "owned 1,024",
        "shared 512",
        "4,096 blocks of 16 tokens",
        "87.6",  # tokens out
        "1,234",  # tokens in
        "182 ms",
        "22.1 ms",
        "42.0 ms",
        "25.0 %",  # KV in use
        "97.7 %",  # share of the used slots that hold tokens
        "71.3 %",  # prefix hits
        "preemptions",
        "2 decode + 384 prefill",
        "not sent by this server",
        "25.0 ms",
        "chatcmpl-1",
        "codex",
        "cmpl-next",
        "waiting",
    ):
        assert words in text


async def test_a_small_terminal_has_a_status_line_in_place_of_the_table(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server, SMALL) as (app, pilot):
        text = screen_text(app)
        assert all(len(line) == 80 for line in text.splitlines())
        assert len(text.splitlines()) == 24
        assert app.screen.query_one(BlockMap).size == (78, 17)
        for words in (
            "SmolLM2-135M-Instruct",
            "● live",
            "87.6 out/s 1,234 in/s 2 running 1 waiting 25.0 % KV",
            "182 ms first token 22.1 ms between, 42.0 ms p99 71.3 % hits 5 preempted",
        ):
            assert words in " ".join(text.split())
        assert "chatcmpl-1" not in text
        await pilot.press("down")
        await pilot.pause()
        assert "chatcmpl-1  1,234 prompt  512 cached  77 out  82 blocks" in screen_text(app)


async def test_resizing_goes_from_one_layout_to_the_other(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.resize_terminal(*SMALL)
        await pilot.pause(0.1)
        assert "out/s" in screen_text(app)
        assert sum(block_map_colors(app).values()) == 78 * 17 * 2
        await pilot.resize_terminal(*LARGE)
        await pilot.pause(0.1)
        text = screen_text(app)
        assert "out/s" not in text
        assert "chatcmpl-1" in text
        assert "87.6" in text


async def test_no_panel_is_cut_off_at_any_height(event_server: EventServer) -> None:
    async with dashboard(event_server, (160, 60)) as (app, pilot):
        column = app.screen.query_one("#numbers")
        for rows in (60, 59, 46, 45, 40, 39, 34, 33, 21, 20, 12, 10):
            await pilot.resize_terminal(160, rows)
            await shown(app, pilot)
            panels = [panel for panel in column.query(Panel) if panel.display and column.display]
            assert panels or rows < 21, rows
            assert all(column.region.contains_region(panel.region) for panel in panels), rows


async def test_any_size_is_survived(event_server: EventServer) -> None:
    async with dashboard(event_server, (1, 1)) as (app, pilot):
        for columns, rows in ((1, 1), (20, 5), (240, 67), (100, 48), (160, 24)):
            await pilot.resize_terminal(columns, rows)
            await pilot.press("c", "down", "question_mark", "escape", "p")
            assert app.is_running
            assert len(screen_text(app).splitlines()) == rows


async def test_text_from_the_server_cannot_steer_the_terminal(event_server: EventServer) -> None:
    hostile = sequence(1, request_id="\x1b]0;owned\x07\x1b[2J", owner="a\nb")
    async with dashboard(
        event_server, LARGE, Answer((INFO, sequences(hostile), STATS, snapshot(CELLS)))
    ) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats and app.session.state.sequences)
        text = screen_text(app)
    assert "\x1b" not in text
    assert "?]0;owned?[2J" in text
    assert "a?b" in text


async def test_many_sequences_scroll_with_the_focus(event_server: EventServer) -> None:
    many = sequences(*(sequence(slot) for slot in range(1, 41)))
    async with dashboard(event_server, LARGE, Answer((INFO, snapshot(CELLS), many, STATS))) as (
        app,
        pilot,
    ):
        await shown(app, pilot, lambda: app.session.state.stats)
        text = screen_text(app)
        assert "chatcmpl-6 " in text
        assert "chatcmpl-7 " not in text
        assert "and 34 more" in text
        await pilot.press("up")  # the last one
        await pilot.pause()
        text = screen_text(app)
        assert "▸■ chatcmpl-40" in text
        assert "chatcmpl-34 " not in text
        assert "and 34 more" in text


async def test_no_requests(event_server: EventServer) -> None:
    async with dashboard(
        event_server, LARGE, Answer((INFO, snapshot(CELLS), sequences(), STATS))
    ) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await pilot.press("down")
        assert "No requests at the moment." in screen_text(app)
