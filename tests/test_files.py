"""Files are opened so that an interruption at any moment stays one."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from appliance import files
from appliance.files import open_regular


def test_an_interruption_while_a_file_is_opened_is_no_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened last closes itself; closing it once more would fail, or close another's."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")

    def interrupted(*given: Any, **options: Any) -> None:
        builtins.open(*given, **options).close()
        raise KeyboardInterrupt

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            open_regular(path)
    with monkeypatch.context() as patch:
        patch.setattr("appliance.files.stat.S_ISREG", interrupted_check)
        with pytest.raises(KeyboardInterrupt):
            open_regular(path)
    assert set(os.listdir("/proc/self/fd")) == before
    with open_regular(path) as file:
        assert file.read() == b"weights"


def interrupted_check(mode: int) -> bool:
    raise KeyboardInterrupt


def test_what_is_no_file_is_refused_by_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, said in ((".", "Is a directory"), ("fifo", "FIFO"), ("none", "No such file")):
        with pytest.raises(OSError, match=said):
            open_regular(tmp_path / name)
