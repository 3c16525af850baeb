"""What was timed on a card is kept, and ignored when something else is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.engine.load import tuning
from appliance.engine.load.tuning import keep, kept_files, kept_for
from appliance.errors import ConfigError
from appliance.kernels.packed_matmul.tiles import MatmulTile
from appliance.kernels.packed_matmul.timed import TimedChoices

CARD = "NVIDIA GeForce RTX 3090"
TILE = MatmulTile(16, 16, 64, 2, 4)
CHOICES = {"4096 x 4096 int4 fp32 128": TimedChoices({16: (TILE, 3)}, 256)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    return tmp_path / "tuning"


def test_what_was_timed_is_read_again_for_its_own_card(folder: Path) -> None:
    assert kept_for(CARD) is None
    keep(CARD, CHOICES)
    found = kept_for(CARD)
    assert found is not None
    assert (found.choices, found.count, found.is_stale) == (CHOICES, 2, False)
    assert [path.name for path in folder.iterdir()] == ["nvidia-geforce-rtx-3090.json"]
    assert kept_for("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("what", ["driver", "torch", "triton", "version"])
def test_another_version_makes_it_stale(what: str, folder: Path) -> None:
    keep(CARD, CHOICES)
    path = folder / "nvidia-geforce-rtx-3090.json"
    value = json.loads(path.read_text())
    value["circumstances"][what] += ".1"
    path.write_text(json.dumps(value))
    assert kept_for(CARD) is None
    assert [kept.is_stale for kept in kept_files()] == [True]
    keep(CARD, CHOICES)  # the next timing replaces it
    assert kept_for(CARD) is not None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"circumstances": {}}', '{"choices": {"a": 1}}', "\x00"]
)
def test_a_file_that_is_not_ours_is_ignored(
    content: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / "nvidia-geforce-rtx-3090.json").write_text(content)
    assert kept_for(CARD) is None
    assert "is ignored" in caplog.text


def test_a_tile_of_another_version_is_ignored(folder: Path) -> None:
    keep(CARD, CHOICES)
    path = folder / "nvidia-geforce-rtx-3090.json"
    path.write_text(path.read_text().replace('"num_warps"', '"warps"'))
    assert kept_for(CARD) is None


def test_the_driver_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "version"
    said.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    monkeypatch.setattr(tuning, "DRIVER", said)
    keep(CARD, CHOICES)
    assert kept_files()[0].circumstances.driver == "535.183.01"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_the_command_lists_and_deletes_what_is_kept(folder: Path) -> None:
    assert "all choices are computed" in call("--show").output
    keep(CARD, CHOICES)
    assert f"{CARD}: 2 choices of 1 kinds of linears, now" in call("--show").output
    assert call("--forget").output.startswith("deleted: ")
    assert not list(folder.iterdir())
    assert isinstance(call("--show", "--forget").exception, ConfigError)


def test_without_a_gpu_nothing_is_timed(tiny_llama: Path, folder: Path) -> None:
    error = call(str(tiny_llama)).exception
    assert isinstance(error, ConfigError)
    assert "timed on a GPU" in str(error)
    assert not folder.exists()
