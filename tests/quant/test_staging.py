"""A folder appears whole or not at all, also when the process is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import QuantizeError
from appliance.quant.staging import check_destination, staged_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("old")
    return path


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged_folder(out) as staging:
        (staging / "file").write_text("x")
        assert not out.exists()
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


def test_nothing_stays_when_the_work_fails(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staged_folder(tmp_path / "out") as staging:
            (staging / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_an_older_folder_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out")
    with pytest.raises(RuntimeError), staged_folder(out):
        raise RuntimeError
    assert (out / "config.json").read_text() == "old"
    with staged_folder(out) as staging:
        (staging / "new").write_text("x")
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_two_writers_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_folder(out) as staging:
        (staging / "file").write_text("x")
        with pytest.raises(QuantizeError, match="another process is writing"), staged_folder(out):
            pass
    assert names(out) == ["file"]


def test_a_killed_writer_leaves_no_folder_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"""
import os, signal
from pathlib import Path
from appliance.quant.staging import staged_folder
with staged_folder(Path({str(out)!r})) as staging:
    (staging / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == -9
    assert not out.exists()
    with staged_folder(out) as staging:
        (staging / "whole").write_text("x")
    assert names(out) == ["whole"]
    assert names(tmp_path) == ["out"]


def test_a_free_or_empty_destination_is_fine(tmp_path: Path) -> None:
    check_destination(tmp_path / "out", tmp_path / "source", overwrite=False)
    (tmp_path / "out").mkdir()
    check_destination(tmp_path / "out", tmp_path / "source", overwrite=False)


def test_an_older_model_needs_permission(tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out")
    with pytest.raises(QuantizeError, match="add --overwrite"):
        check_destination(out, tmp_path / "source", overwrite=False)
    check_destination(out, tmp_path / "source", overwrite=True)


def test_other_folders_are_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "holiday.jpg").write_text("x")
    with pytest.raises(QuantizeError, match="not a model folder"):
        check_destination(out, tmp_path / "source", overwrite=True)


def test_a_file_is_no_destination(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(QuantizeError, match="is a file"):
        check_destination(tmp_path / "out", tmp_path / "source", overwrite=True)


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source")
    for out in (source, tmp_path):
        with pytest.raises(QuantizeError, match="choose another folder"):
            check_destination(out, source, overwrite=True)
    with pytest.raises(QuantizeError, match="choose another folder"):
        check_destination(source, source / "model.gguf", overwrite=True)
