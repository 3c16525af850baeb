from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.events import BlockRun, Delta, Job, Log, LogLine
from appliance.tui.recording import Recorder, ReplayFeed, decode_item, encode_item
from appliance.tui.state import ConnectionChange, ConnectionPhase, DashboardState, FeedItem, reduce
from tests.tui.conftest import CACHED, FREE, INFO, STATS, sequence, sequences, snapshot
from tests.tui.test_controls import TABLE

ITEMS: list[FeedItem] = [
    ConnectionChange(ConnectionPhase.LIVE),
    INFO,
    snapshot([FREE] * 4),
    sequences(sequence(1)),
    Delta(epoch=1, runs=(BlockRun(1, 2, CACHED),)),
    STATS,
    TABLE,
    Log(lines=(LogLine(time=1.0, level="ERROR", source="engine", message='a "quoted" ☃'),)),
    Job(name="quantize", stage="layers", done=1, total=30),
    ConnectionChange(ConnectionPhase.LOST, "cut"),
]


def record(path: Path) -> None:
    recorder = Recorder(path, "http://box")
    for item in ITEMS:
        recorder.write(item)
    recorder.close()
    assert not recorder.failure


async def played(path: Path) -> list[FeedItem]:
    items: list[FeedItem] = []
    await ReplayFeed(path, speed=float("inf")).follow(items.append)
    return items


def state_after(items: list[FeedItem]) -> DashboardState:
    state = DashboardState()
    for item in items:
        state = reduce(state, item)
    return state


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_every_item_comes_back_from_a_line(item: FeedItem) -> None:
    line = encode_item(item, 12.3456)
    assert b"\n" not in line
    assert decode_item(line) == (12.346, item)


async def test_a_recording_is_played_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    record(path)
    assert path.stat().st_mode & 0o077 == 0, "for its owner only"
    *items, end = await played(path)
    assert items == ITEMS
    assert end == ConnectionChange(ConnectionPhase.ENDED, "the recording is over")
    assert ReplayFeed(path).name == "one.jsonl of http://box"


async def test_items_come_at_their_time(tmp_path: Path) -> None:
    path = tmp_path / "one"
    record(path)
    with path.open("ab") as file:
        file.write(encode_item(STATS, 1.0) + b"\n")
    begin = time.monotonic()
    await ReplayFeed(path, speed=10.0).follow(lambda item: None)
    assert 0.1 <= time.monotonic() - begin < 5.0


async def test_a_recording_that_was_cut_short_is_played_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    record(path)
    path.write_bytes(path.read_bytes()[:-20])
    *items, end = await played(path)
    assert items == ITEMS[:-1]
    assert isinstance(end, ConnectionChange)
    assert "line 11 of the recording cannot be read" in end.reason


async def test_lines_of_another_version_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "newer"
    record(path)
    with path.open("ab") as file:
        file.write(b'{"t":1,"name":"weather","data":{"rain":1}}\n')
    assert (await played(path))[:-1] == ITEMS


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "here"
    path.touch()
    with pytest.raises(ConfigError, match="the file exists"):
        Recorder(path, "")
    with pytest.raises(ConfigError, match="No such file"):
        Recorder(tmp_path / "no" / "folder", "")


@pytest.mark.parametrize("content", [b"", b"a photo", b'{"appliance": 1}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a recording"):
        ReplayFeed(path)


def test_recordings_of_newer_versions_and_missing_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"appliance_recording": 99, "source": "x", "time": 0}\n')
    with pytest.raises(ConfigError, match="newer version"):
        ReplayFeed(path)
    with pytest.raises(ConfigError, match="No such file"):
        ReplayFeed(tmp_path / "missing")


def test_a_full_disk_ends_the_recording_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "open", lambda *_: full)
    recorder = Recorder(Path("of any name"), "http://box")
    recorder.write(STATS)
    assert recorder.failure == "recording stopped: No space left on device"
    recorder.write(STATS)
    recorder.close()
