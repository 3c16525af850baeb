from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config import EngineConfig
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.folders import check_folders, check_leftovers

Look = Callable[[Check, Scope], dict[str, Finding]]


def test_folders_that_are_there_or_can_be_made(look: Look, tmp_path: Path) -> None:
    found = look(check_folders, Scope())
    folders = [name for name in found if name.endswith("folder")]
    assert folders == [
        "cache folder",
        "KV cache folder",
        "packed weights folder",
        "hub cache folder",
    ]
    assert {found[name].grade for name in folders} == {Grade.OK}
    assert "made when it is needed" in found["cache folder"].found
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_file_in_the_place_of_a_folder(look: Look, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    found = look(check_folders, Scope())["cache folder"]
    assert (found.grade, "is no folder" in found.found) == (Grade.FAIL, True)
    assert "APPLIANCE_CACHE_DIR" in found.fix


def test_a_folder_that_may_not_be_written_to(look: Look) -> None:
    """Below /proc not even root may write."""
    found = look(check_folders, Scope(engine=EngineConfig(kv_disk="/proc/kv")))["KV cache folder"]
    assert (found.grade, "cannot be written to" in found.found) == (Grade.FAIL, True)
    assert "kv_disk" in found.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_the_wrong_mode(look: Look, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    assert look(check_folders, Scope())["cache folder"].grade is Grade.FAIL


def test_a_kv_folder_that_others_may_change(look: Look, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kv"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    assert look(check_folders, Scope())["KV cache owner"].grade is Grade.OK
    folder.chmod(0o777)
    found = look(check_folders, Scope())["KV cache owner"]
    assert (found.grade, "chmod 700" in found.found) == (Grade.FAIL, True)


@pytest.mark.parametrize(
    ("free", "grade"), [(1 << 20, Grade.FAIL), (1 << 30, Grade.WARN), (1 << 40, Grade.OK)]
)
def test_a_disk_that_is_nearly_full(
    look: Look, monkeypatch: pytest.MonkeyPatch, free: int, grade: Grade
) -> None:
    usage = type(shutil.disk_usage("/"))(1 << 41, (1 << 41) - free, free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    found = look(check_folders, Scope())
    assert {found[f"{name} disk"].grade for name in ("cache", "KV cache", "hub cache")} == {grade}


def test_a_lock_that_nobody_holds_and_half_a_download(look: Look, tmp_path: Path) -> None:
    assert {one.grade for one in look(check_leftovers, Scope()).values()} == {Grade.OK}
    jobs, blobs = tmp_path / "cache" / "jobs", tmp_path / "hub" / "models--a--b" / "blobs"
    jobs.mkdir(parents=True)
    (jobs / "1-a.json").write_text("{}")
    (jobs / "1-a.lock").touch()
    with (jobs / "1-a.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look(check_leftovers, Scope())["tasks"].grade is Grade.OK, "it goes on"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"half")
    found = look(check_leftovers, Scope())
    assert (found["tasks"].grade, f"rm {jobs}/1-a.*" in found["tasks"].fix) == (Grade.WARN, True)
    assert found["downloads"].grade is Grade.WARN
    assert "abc.incomplete" in found["downloads"].found
