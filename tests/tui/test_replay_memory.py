"""The whole dashboard's memory over a long run."""

from __future__ import annotations

import asyncio
import gc
import math
from typing import TYPE_CHECKING

import msgspec
import psutil

from appliance.events import BlockRun, Delta, Log, LogLine, Stats
from appliance.tui.app import FRAMES_PER_SECOND, DashboardApp
from appliance.tui.recording import FORMAT, RecordingHeader, ReplayFeed, encode_item
from appliance.tui.session import Timeline
from appliance.tui.state import ConnectionChange, ConnectionPhase
from tests.tui.conftest import INFO, STATS, active, sequence, sequences, snapshot
from tests.tui.piloting import CELLS, LARGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from appliance.tui.state import FeedItem

SECONDS = 1800
PAINT_SECONDS = 20
MEASURE_SECONDS = 300
MOST_GROWTH = 4 * 2**20  # a timeline without bounds grew by 13 MiB


def happened(frame: int) -> Iterator[FeedItem]:
    """The events of a busy server in one frame."""
    if frame == 0:
        yield from (ConnectionChange(ConnectionPhase.LIVE), INFO, snapshot(CELLS))
    at = frame * 37 % 4000
    yield Delta(epoch=1, runs=(BlockRun(at, 40, active(frame % 30 + 1, frame % 3 + 1)),))
    second, part = divmod(frame, FRAMES_PER_SECOND)
    if part:
        return
    engine = msgspec.structs.replace(STATS.engine, steps_total=20 * second)
    yield msgspec.structs.replace(
        STATS, time=float(second), uptime_seconds=float(second), engine=engine,
        generation_tokens_per_second=80.0 + second % 17,
    )  # fmt: skip
    live = (second // 5 + number for number in range(12))
    yield sequences(*(sequence(one % 30 + 1, request_id=f"chatcmpl-{one:024x}") for one in live))
    line = LogLine(time=float(second), level="WARNING", source="engine", message=f"at {second}")
    yield Log(lines=(line,))


async def test_half_an_hour_of_a_replay_takes_no_more_memory_than_its_first_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.freeze()  # garbage of other files takes much longer to search than this file's
    path = tmp_path / "recording"
    with path.open("wb") as file:
        file.write(
            msgspec.json.encode(RecordingHeader(appliance_recording=FORMAT, source="x", time=0.0))
        )
        for frame in range(SECONDS * FRAMES_PER_SECOND):
            for item in happened(frame):
                file.write(b"\n" + encode_item(item, frame / FRAMES_PER_SECOND))
    app = DashboardApp(ReplayFeed(path, speed=math.inf))
    app.session.timeline = Timeline(2**20)  # full after some minutes
    sizes: list[int] = []
    take = app.take

    def take_and_paint(item: FeedItem) -> None:
        take(item)
        if isinstance(item, Stats) and item.time % PAINT_SECONDS == 0:
            app.paint()
        if isinstance(item, Stats) and item.time % MEASURE_SECONDS == 0:
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)

    monkeypatch.setattr(app, "take", take_and_paint)
    async with app.run_test(size=LARGE) as pilot, asyncio.timeout(120):
        while app.session.state.connection.phase is not ConnectionPhase.ENDED:
            await pilot.pause(0.1)
    assert len(sizes) == SECONDS // MEASURE_SECONDS
    assert max(sizes[2:]) - sizes[1] < MOST_GROWTH, sizes
