from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.events import Job
from appliance.progress.jobs import JobFile, read_jobs


def the_job(folder: Path) -> Job:
    """The only job."""
    (job,) = read_jobs(folder).values()
    return job


def test_a_task_is_known_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("appliance.progress.jobs.time.monotonic", lambda: now)
    folder = tmp_path / "jobs"
    assert read_jobs(folder) == {}
    with JobFile(folder, "quantize tiny") as job:
        assert read_jobs(folder) == {}
        job.update("layers", 0, 10)
        assert the_job(folder) == Job(name="quantize tiny", stage="layers", done=0, total=10)
        now += 0.1
        job.update("layers", 1, 10)
        assert the_job(folder).done == 0, "not with every step"
        now += 3.9
        job.update("layers", 2, 10)
        told = the_job(folder)
        assert told.done == 2
        assert told.seconds_left == pytest.approx(16.0)
        job.update("writing", 0, 5)
        assert the_job(folder).stage == "writing", "a new stage at once"
        job.update("writing", 5, 5)
        assert the_job(folder).done == 5, "so is an end"
        job.update("checking", 1, 4, seconds_left=7.5)
        assert the_job(folder).seconds_left == 7.5
    assert list(folder.iterdir()) == []


def test_all_that_is_known_of_a_part_is_told(tmp_path: Path) -> None:
    with JobFile(tmp_path, "n") as job:
        job.update("s", 1, 4, part="layer 2", parts_done=3, parts_total=9, loss=0.25)
        assert the_job(tmp_path) == Job(
            name="n", stage="s", done=1, total=4, part="layer 2", parts_done=3, parts_total=9,
            loss=0.25,
        )  # fmt: skip


KILLED = """
import os, pathlib, signal, sys
from appliance.progress.jobs import JobFile

with JobFile(pathlib.Path(sys.argv[1]), "killed") as job:
    job.update("s", 1, 2)
    print("told", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_task_left_means_nothing_and_goes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        assert the_job(tmp_path).name == "killed"
        with JobFile(tmp_path, "other"):
            assert the_job(tmp_path).name == "killed", "one that is going on is left alone"
        process.communicate("")
    left = list(tmp_path.glob("*.json"))
    assert len(left) == 1
    assert read_jobs(tmp_path) == {}
    with JobFile(tmp_path, "next"):
        assert not left[0].exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"name": 1}'])
def test_a_file_that_is_no_task_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "stranger.json").write_text("{}")
    with JobFile(tmp_path, "n") as job:
        job.update("s", 1, 2)
        (path,) = tmp_path.glob(f"{os.getpid()}-*.json")
        assert list(read_jobs(tmp_path)) == [path.stem]
        path.write_text(content)
        assert read_jobs(tmp_path) == {}


def test_a_folder_that_cannot_be_had_stops_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with JobFile(blocked / "jobs", "n") as job:
        job.update("s", 1, 2)
    assert read_jobs(blocked / "jobs") == {}
