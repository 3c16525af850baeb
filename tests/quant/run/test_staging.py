"""A folder appears whole or not at all, and unfinished work stays for the next run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import QuantizeError
from appliance.quant.run.staging import StagingFolders, check_destination, locked


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("old")
    return path


def begun(out: Path) -> StagingFolders:
    """A staging folder with one file in the result."""
    staging = StagingFolders(out)
    with locked(staging):
        staging.start_over()
        (staging.result / "file").write_text("x")
    return staging


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    staging = begun(out)
    assert not out.exists()
    staging.publish()
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


def test_what_was_built_is_there_for_the_next_run(tmp_path: Path) -> None:
    begun(tmp_path / "out")
    staging = StagingFolders(tmp_path / "out")
    with locked(staging):
        assert names(staging.result) == ["file"]
        staging.start_over()
        assert names(staging.result) == names(staging.state) == []


def test_an_older_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out")
    begun(out).publish()
    assert names(out) == ["file"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("call", range(4))
def test_publishing_that_was_cut_short_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    out = model_folder(tmp_path / "out")
    staging = begun(out)
    calls = 0

    def cut(function: Callable[..., object]) -> Callable[..., object]:
        def count(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return count

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut(Path.rename))
        patch.setattr(shutil, "rmtree", cut(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            staging.publish()
    staging.publish()
    assert names(out) == ["file"]
    assert names(tmp_path) == ["out"]


def test_two_writers_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    staging = StagingFolders(tmp_path / "out")
    with (
        locked(staging),
        pytest.raises(QuantizeError, match="another process is writing"),
        locked(StagingFolders(tmp_path / "out")),
    ):
        pass
    with locked(staging):
        pass


def test_a_killed_writer_holds_no_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"""
import os, signal
from pathlib import Path
from appliance.quant.run.staging import StagingFolders, locked
staging = StagingFolders(Path({str(out)!r}))
with locked(staging):
    staging.start_over()
    (staging.result / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == -9
    assert not out.exists()
    staging = StagingFolders(out)
    with locked(staging):
        assert names(staging.result) == ["half"]


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
