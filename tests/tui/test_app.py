"""The whole dashboard in front of a real server, read off the screen's own cells."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from textual.geometry import Region

from appliance.events import Delta, Run
from appliance.tui import palette
from appliance.tui.app import DashboardApp
from appliance.tui.client import EventFeed
from appliance.tui.screens.help import HelpScreen
from appliance.tui.state import Phase
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.requests import RequestTable
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

    from textual.pilot import Pilot

LARGE, SMALL = (160, 48), (80, 24)
# Two sequences, a prefix that they share, and what others left behind.
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


@asynccontextmanager
async def dashboard(
    server: EventServer, size: tuple[int, int] = LARGE, *answers: Answer
) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
    server.answers = list(answers) or [EVERYTHING]
    app = DashboardApp(EventFeed(server.url, None, first_retry=0.05))
    async with app.run_test(size=size) as pilot:
        if not answers:
            await shown(app, pilot, lambda: app.state.stats)
        yield app, pilot


async def shown(
    app: DashboardApp, pilot: Pilot[None], happened: Callable[[], object] = lambda: True
) -> None:
    """Wait until something happened, and until it is on the screen."""
    for _ in range(500):
        if happened():
            break
        await pilot.pause(0.01)
    else:
        pytest.fail("it never happened")
    app.paint()
    await pilot.pause()


def screen_text(app: DashboardApp) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def colors(app: DashboardApp) -> dict[str, int]:
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


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_the_map_shows_owners_and_what_they_share(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size) as (app, _):
        seen = colors(app)
    area = sum(seen.values())
    # An eighth is shared, an eighth is each sequence's own, an eighth cached, half free.
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
        "97.7 %",  # of the slots in use hold tokens
        "71.3 %",  # prefix hits
        "preemptions",
        "384 + 2",
        "128 MiB",
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
        assert sum(colors(app).values()) == 78 * 17 * 2
        await pilot.resize_terminal(*LARGE)
        await pilot.pause(0.1)
        text = screen_text(app)
        assert "out/s" not in text
        assert "chatcmpl-1" in text
        assert "87.6" in text


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (240, 67), (100, 48), (160, 24)])
async def test_any_size_is_survived(event_server: EventServer, size: tuple[int, int]) -> None:
    async with dashboard(event_server, size) as (app, pilot):
        await pilot.press("c", "down", "question_mark", "escape", "p")
        assert app.is_running
        assert len(screen_text(app).splitlines()) == size[1]


async def test_colour_modes(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        seen = colors(app)
        assert {palette.ACTIVE, palette.SHARED, palette.CACHED, palette.FREE} <= set(seen)
        assert palette.owner_hue(1) not in seen
        assert "KV blocks by state" in screen_text(app)
        assert "active 1,024" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        seen = colors(app)
        assert seen[palette.REFERENCE_STEPS[0]] > seen[palette.REFERENCE_STEPS[1]] > 0
        assert palette.SHARED not in seen
        assert "KV blocks by references" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        assert "KV blocks by owner" in screen_text(app)
        assert palette.owner_hue(1) in colors(app)


async def test_focus_dims_the_others_and_follows_the_keys(event_server: EventServer) -> None:
    first, second = palette.owner_hue(1), palette.owner_hue(2)
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("tab")
        await pilot.pause()
        seen = colors(app)
        assert first in seen
        assert palette.dimmed(second) in seen
        assert {second, palette.FREE, palette.CACHED}.isdisjoint(seen)
        assert "▸■ chatcmpl-1" in screen_text(app)

        await pilot.press("down")
        await pilot.pause()
        seen = colors(app)
        # The shared blocks were taken by the second sequence last, so they are lit with it.
        assert {second, palette.SHARED} <= set(seen)
        assert first not in seen

        await pilot.press("down")
        await pilot.pause()
        assert "▸■ cmpl-next" in screen_text(app)
        assert {first, second, palette.SHARED}.isdisjoint(colors(app))

        await pilot.press("up", "shift+tab")
        await pilot.pause()
        assert "▸■ chatcmpl-1" in screen_text(app)

        await pilot.press("escape")
        await pilot.pause()
        assert {first, second, palette.FREE} <= set(colors(app))


async def test_focus_ends_with_its_sequence(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("down")
        event_server.send(sequences(sequence(2)))
        await shown(app, pilot, lambda: len(app.state.sequences) == 1)
        assert "▸" not in screen_text(app)
        assert palette.FREE in colors(app)


async def test_a_click_on_a_block_or_a_line_focuses_its_sequence(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        block_map = app.screen.query_one(BlockMap)
        await pilot.click(BlockMap, offset=(5, block_map.size.height * 3 // 16))
        await pilot.pause()
        assert "▸■ chatcmpl-1" in screen_text(app)
        await pilot.click(BlockMap, offset=(5, block_map.size.height * 3 // 4))  # free
        await pilot.pause()
        assert "▸" not in screen_text(app)
        # In the border: a line, its heading, then the second sequence.
        await pilot.click(RequestTable, offset=(9, 3))
        await pilot.pause()
        assert "▸■ chatcmpl-2" in screen_text(app)


async def test_deltas_change_what_is_shown(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(0, 4096, CACHED),)))
        await shown(app, pilot, lambda: app.state is not before)
        assert set(colors(app)) <= {palette.CACHED, palette.BACKGROUND}
        assert "cached 4,096" in screen_text(app)


async def test_only_what_changed_is_painted(
    event_server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dashboard(event_server) as (app, pilot):
        block_map = app.screen.query_one(BlockMap)
        painted: list[tuple[Region, ...]] = []
        refresh = block_map.refresh

        def spy(*regions: Region) -> BlockMap:
            painted.append(regions)
            return refresh(*regions)

        monkeypatch.setattr(block_map, "refresh", spy)
        app.paint()
        assert not painted, "nothing is new"
        before = app.state
        event_server.send(Delta(epoch=1, runs=(Run(2100, 1, active(1)),)))
        await shown(app, pilot, lambda: app.state is not before)
        (regions,) = painted
        assert 1 <= sum(region.area for region in regions) <= 4
        assert palette.owner_hue(1) in {
            color.name
            for region in regions
            for segment in block_map.render_line(region.y)
            if segment.style is not None
            for color in (segment.style.color, segment.style.bgcolor)
            if color is not None
        }


async def test_pause_holds_the_picture(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press("p")
        event_server.send(Delta(epoch=1, runs=(Run(0, 4096, CACHED),)))
        before = app.state
        await shown(app, pilot, lambda: app.state is not before)
        assert "‖ paused" in screen_text(app)
        assert palette.owner_hue(1) in colors(app)
        await pilot.press("p")
        await pilot.pause()
        assert "● live" in screen_text(app)
        assert palette.owner_hue(1) not in colors(app)


async def test_a_lost_server_leaves_a_dim_picture_and_comes_back(event_server: EventServer) -> None:
    async with dashboard(event_server) as (app, pilot):
        await event_server.stop()
        await shown(app, pilot, lambda: app.state.connection.phase is Phase.LOST)
        assert "lost, retrying" in screen_text(app)
        seen = colors(app)
        assert palette.dimmed(palette.owner_hue(1)) in seen
        assert palette.owner_hue(1) not in seen
        event_server.answers = [Answer((INFO, snapshot([CACHED] * 4096, epoch=1), STATS))]
        await event_server.start()
        await shown(app, pilot, lambda: app.state.current)
        await shown(app, pilot, lambda: app.state.blocks and app.state.blocks.counts().cached)
        assert "● live" in screen_text(app)
        assert palette.CACHED in colors(app)


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(status="401 Unauthorized"), ["wants another key", "APPLIANCE_API_KEY"]),
        (Answer(content_type="text/html"), ["is not an appliance", "200 text/html", "retrying"]),
        (Answer(), ["Connected", "waiting for the server"]),
        (
            Answer((msgspec.structs.replace(INFO, state="loading"),)),
            ["SmolLM2-135M-Instruct is loading"],
        ),
        (
            Answer((msgspec.structs.replace(INFO, state="failed", reason="no memory"),)),
            ["The engine failed", "no memory"],
        ),
    ],
)
async def test_what_is_wrong_stands_in_place_of_the_map(
    event_server: EventServer, answer: Answer, words: list[str], size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size, answer) as (app, pilot):
        await shown(app, pilot, lambda: words[0] in screen_text(app))
        text = screen_text(app)
    for word in words:
        assert word in text


async def test_nobody_there(event_server: EventServer) -> None:
    await event_server.stop()
    async with dashboard(event_server, SMALL, Answer()) as (app, pilot):
        await shown(app, pilot, lambda: app.state.connection.phase is Phase.LOST)
        text = screen_text(app)
    assert f"No connection to {event_server.url}" in text
    assert "connection refused; is the server running?" in text


async def test_a_restarting_engine_is_told_and_its_old_map_dimmed(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server) as (app, pilot):
        event_server.send(msgspec.structs.replace(INFO, state="restarting", restarts=1))
        await shown(app, pilot, lambda: not app.state.current)
        assert "restarting · restarted 1 x" in screen_text(app)
        assert palette.owner_hue(1) not in colors(app)


async def test_text_from_the_server_cannot_steer_the_terminal(event_server: EventServer) -> None:
    hostile = sequence(1, request_id="\x1b]0;owned\x07\x1b[2J", owner="a\nb")
    async with dashboard(
        event_server, LARGE, Answer((INFO, sequences(hostile), STATS, snapshot(CELLS)))
    ) as (app, pilot):
        await shown(app, pilot, lambda: app.state.stats and app.state.sequences)
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
        await shown(app, pilot, lambda: app.state.stats)
        text = screen_text(app)
        assert "chatcmpl-8 " in text
        assert "chatcmpl-9 " not in text
        assert "and 32 more" in text
        await pilot.press("up")  # the last one
        await pilot.pause()
        text = screen_text(app)
        assert "▸■ chatcmpl-40" in text
        assert "chatcmpl-32 " not in text
        assert "and 32 more" in text


async def test_no_requests(event_server: EventServer) -> None:
    async with dashboard(
        event_server, LARGE, Answer((INFO, snapshot(CELLS), sequences(), STATS))
    ) as (app, pilot):
        await shown(app, pilot, lambda: app.state.stats)
        await pilot.press("down")
        assert "No requests at the moment." in screen_text(app)


async def test_help(event_server: EventServer) -> None:
    async with dashboard(event_server, SMALL) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        assert "focus the next sequence, all others dimmed" in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
        assert not isinstance(app.screen, HelpScreen)
        assert app.is_running


async def test_a_frame_may_fall_due_before_the_start_and_after_the_end(
    event_server: EventServer,
) -> None:
    event_server.answers = [EVERYTHING]
    app = DashboardApp(EventFeed(event_server.url, None))
    app.paint()
    async with app.run_test() as pilot:
        await shown(app, pilot, lambda: app.state.stats)
    app.paint()


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_quitting_ends_the_feed(event_server: EventServer, key: str) -> None:
    async with dashboard(event_server) as (app, pilot):
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running
    assert app.return_code == 0
