from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from appliance.files import bytes_on_disk
from appliance.hub.growth import watch_growth

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_new_bytes_are_reported_and_the_total_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(bytes(5000))
    seen = []
    with watch_growth(tmp_path, "get", 100, lambda *told: seen.append(told)):
        (tmp_path / "new").write_bytes(bytes(5000))
    assert seen[0] == ("get", 0, 100)
    assert seen[-1] == ("get", 100, 100)


def test_files_count_and_links_do_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "other").symlink_to(tmp_path / "folder" / "file")
    assert bytes_on_disk(tmp_path) == 5000
    assert bytes_on_disk(tmp_path / "folder" / "file") == 5000
    assert bytes_on_disk(tmp_path / "none") == 0


def test_reserved_space_does_not_count(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    assert bytes_on_disk(tmp_path) == 0


def test_folders_may_disappear_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")

    def gone(file: Any) -> os.stat_result:
        monkeypatch.undo()
        shutil.rmtree(tmp_path)
        return os.lstat(file)

    monkeypatch.setattr(os, "lstat", gone)
    assert bytes_on_disk(tmp_path) == 0
    assert not tmp_path.exists()
