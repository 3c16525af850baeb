from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from appliance.events import Job
from appliance.jobs import JobFile, read_jobs


def test_a_task_is_known_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("appliance.jobs.time.monotonic", lambda: now)
    folder = tmp_path / "jobs"
    assert read_jobs(folder) == {}
    with JobFile(folder, "quantize tiny") as job:
        assert read_jobs(folder) == {}
        job.update("layers", 0, 10)
        assert read_jobs(folder)[os.getpid()] == Job(
            name="quantize tiny", stage="layers", done=0, total=10
        )
        now += 0.1
        job.update("layers", 1, 10)
        assert read_jobs(folder)[os.getpid()].done == 0, "not with every step"
        now += 3.9
        job.update("layers", 2, 10)
        told = read_jobs(folder)[os.getpid()]
        assert told.done == 2
        assert told.seconds_left == pytest.approx(16.0)
        job.update("writing", 0, 5)
        assert read_jobs(folder)[os.getpid()].stage == "writing", "a new stage at once"
        job.update("writing", 5, 5)
        assert read_jobs(folder)[os.getpid()].done == 5, "so is an end"
        job.update("checking", 1, 4, seconds_left=7.5)
        assert read_jobs(folder)[os.getpid()].seconds_left == 7.5
    assert list(folder.iterdir()) == []


def test_what_a_killed_task_left_means_nothing_and_goes(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = tmp_path / f"{process.pid}.json"
    dead.write_bytes(msgspec.json.encode(Job(name="n", stage="s", done=1, total=2)))
    assert read_jobs(tmp_path) == {}
    with JobFile(tmp_path, "next"):
        assert not dead.exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"name": 1}'])
def test_a_file_that_is_no_task_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / f"{os.getpid()}.json").write_text(content)
    (tmp_path / "stranger.json").write_text("{}")
    assert read_jobs(tmp_path) == {}


def test_a_folder_that_cannot_be_had_stops_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with JobFile(blocked / "jobs", "n") as job:
        job.update("s", 1, 2)
    assert read_jobs(blocked / "jobs") == {}
