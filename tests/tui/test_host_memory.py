"""The contents of host memory are shown beside the map, and distinguished from those on it."""

from __future__ import annotations

import msgspec
import pytest
from support.server.block_cells import pack_cell

from appliance.events import NO_OWNER
from appliance.tui import palette
from appliance.tui.terminal import Colors, DisplaySettings
from appliance.tui.widgets.strips import HostStrip
from tests.tui.conftest import FREE, INFO, STATS, Answer, EventServer, sequence, sequences, snapshot
from tests.tui.piloting import LARGE, SMALL, dashboard, screen_text, shown

LOADING = pack_cell(4, 0, 1, 1)
SWAPPED = [
    sequence(0, "swapped", request_id=name, blocks=0, kept_tokens=16 * blocks, host_blocks=blocks)
    for name, blocks in (("far", 10), ("near", 30))
]


def answer(**numbers: int) -> Answer:
    engine = msgspec.structs.replace(STATS.engine, **numbers)
    cells = [*[LOADING] * 64, *[FREE] * 4000, *[pack_cell(2, 0, 1, NO_OWNER)] * 32]
    stats = msgspec.structs.replace(STATS, engine=engine)
    return Answer((INFO, snapshot(cells), sequences(sequence(1), *SWAPPED), stats))


FULL = answer(kv_host_blocks=50, kv_host_swapped=40, kv_host_capacity=100, swaps_total=2, swapped=2)


def colors(strip: HostStrip) -> dict[str, int]:
    """Cells of the bar by colour."""
    counts: dict[str, int] = {}
    for segment in strip.render_line(0):
        if segment.style and segment.style.bgcolor and not segment.text.strip():
            name = segment.style.bgcolor.name
            counts[name] = counts.get(name, 0) + segment.cell_length
    return counts


async def test_the_strip_shows_what_waits_and_what_room_is_left(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, FULL) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        strip = app.screen.query_one(HostStrip)
        text = screen_text(app)
        assert "40 swapped, 10 cached, of 100 blocks" in text
        assert "■ loading 64" in text
        assert "■ swapped 40" in text
        seen = colors(strip)
        width = seen[palette.SWAPPED] + seen[palette.CACHED] + seen[palette.FREE]
        assert seen[palette.SWAPPED] == round(0.4 * width)
        assert seen[palette.CACHED] == round(0.1 * width)
        await pilot.press("tab", "tab", "tab")
        await shown(app, pilot)
        assert app.session.look.focus is not None
        assert app.session.look.focus.request_id == "near"
        seen = colors(strip)
        assert "30 of it in focus" in screen_text(app)
        assert seen[palette.SWAPPED] > 2 * seen[palette.dimmed(palette.SWAPPED)] > 0


async def test_one_block_is_seen_and_no_more_cells_are_drawn_than_there_are(
    event_server: EventServer,
) -> None:
    few = answer(kv_host_blocks=2, kv_host_swapped=1, kv_host_capacity=100_000)
    async with dashboard(event_server, LARGE, few) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        seen = colors(app.screen.query_one(HostStrip))
        assert seen[palette.SWAPPED] == seen[palette.CACHED] == 1


async def test_without_that_tier_the_map_has_the_line(event_server: EventServer) -> None:
    async with dashboard(event_server, LARGE, answer()) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        assert "host memory" not in screen_text(app)


async def test_a_server_that_starts_anew_has_no_host_memory_yet(
    event_server: EventServer,
) -> None:
    async with dashboard(event_server, LARGE, FULL) as (app, pilot):
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        assert "host memory" in screen_text(app)
        event_server.send(STATS)
        await shown(app, pilot, lambda: app.session.state.stats == STATS)
        await shown(app, pilot)
        assert "host memory" not in screen_text(app)


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_letters_tell_it_where_there_are_no_colours(
    event_server: EventServer, size: tuple[int, int]
) -> None:
    async with dashboard(event_server, size, FULL, display=DisplaySettings(Colors.NONE)) as (
        app,
        pilot,
    ):
        await pilot.press("2")
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        line = next(one for one in screen_text(app).splitlines() if "host memory" in one)
        assert "sss:" in line
        assert ":..." in line


async def test_a_request_says_what_it_waits_for(event_server: EventServer) -> None:
    beam = sequence(3, "to fork", request_id="beam", blocks=0)
    events = (INFO, snapshot([FREE] * 64), sequences(*SWAPPED, beam), STATS)
    async with dashboard(event_server, LARGE, Answer(events)) as (app, pilot):
        await pilot.press("3", "slash", *"beam", "enter", "tab")
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        assert "to fork: a beam that waits to fork" in " ".join(screen_text(app).split())
        await pilot.press("escape", "escape", "slash", *"near", "enter", "tab")
        await shown(app, pilot)
        facts = " ".join(screen_text(app).split())
        assert "kept for it tokens 480" in facts
        assert "blocks in host memory 30" in facts
        await pilot.press("2")
        await shown(app, pilot)
        facts = " ".join(screen_text(app).split())
        assert "blocks in host memory 30" in facts
        assert "had to make room" in facts


async def test_the_memory_page_tells_of_the_tiers(event_server: EventServer) -> None:
    disk = answer(
        preemptions_total=8, swaps_total=6, prefix_queries_total=1000, prefix_hits_host_total=50,
        prefix_hits_disk_total=250, kv_host_capacity=100, kv_disk_capacity_bytes=2**30,
        kv_disk_corrupt_total=1,
    )  # fmt: skip
    async with dashboard(event_server, LARGE, disk) as (app, pilot):
        await pilot.press("4")
        await shown(app, pilot, lambda: app.session.state.stats)
        await shown(app, pilot)
        text = " ".join(screen_text(app).replace("│", " ").split())
    for words in (
        "swapped to host memory 75.0 % 6",
        "computed again 25.0 % 2",
        "prefix hits from there 50 tokens 5.0 %",
        "prefix hits from there 250 tokens 25.0 %",
        "damaged, removed 1",
        "cannot be written to",
    ):
        assert words in text
