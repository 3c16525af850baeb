"""`appliance cache` on a folder that servers have left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.engine.blocks.block_hashes import state_key
from appliance.engine.tiers.disk_store import DiskStore
from appliance.errors import ConfigError

DAY = 86400


def store_of(
    root: Path, model: str, *, blocks: int, states: int = 0, age: float = 0.0
) -> DiskStore:
    fingerprint = model.encode().ljust(16, b"-")
    store = DiskStore(root, fingerprint, 1 << 16, 1 << 40, {"model": model}, state_bytes=1 << 12)
    store.open()
    for number in range(blocks):
        stamp = int((time.time() - age - number * DAY) * 1e9)
        store.write(number.to_bytes(16, "big"), bytes(1 << 16), stamp)
        if number < states:
            store.write(state_key(number.to_bytes(16, "big")), bytes(1 << 12), stamp)
    return store


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    return tmp_path / "kv"


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


def test_what_is_kept_is_listed_and_counted(root: Path) -> None:
    assert "nothing is kept" in call("ls")
    store_of(root, "old", blocks=2, age=9 * DAY)
    store_of(root, "young", blocks=16)
    header, young, old = call("ls").splitlines()
    columns = ["id", "model", "KV", "cache", "blocks", "states", "size", "last", "used"]
    assert header.split() == columns
    assert young.split()[:2] == [b"young".ljust(16, b"-").hex()[:12], "young"]
    assert "1.0 MiB" in young
    assert old.endswith("1w ago")
    assert "1.1 MiB in 18 blocks of 2 models" in call("du")
    listed = json.loads(call("ls", "--json"))
    assert [(model["model"], model["blocks"]) for model in listed] == [("young", 16), ("old", 2)]


def test_states_are_counted_beside_the_blocks(root: Path) -> None:
    store_of(root, "hybrid", blocks=4, states=1)
    (listed,) = json.loads(call("ls", "--json"))
    assert (listed["blocks"], listed["states"]) == (4, 1)
    assert call("ls").splitlines()[1].split()[2:5] == ["?", "4", "1"]
    assert "in 4 blocks and 1 state checkpoint of 1 model:" in call("du")
    assert "in 4 blocks and 1 state checkpoint\n" in call("rm", "--all")


def test_one_model_all_or_the_oldest_blocks_are_removed(root: Path) -> None:
    store_of(root, "a", blocks=3)
    b = store_of(root, "b", blocks=3)
    assert "in 1 block\n" in call("rm", b.fingerprint.hex()[:8], "--older-than", "36h")
    assert "in 1 block\n" in call("rm", "--older-than", "36h")
    assert "in 2 blocks" in call("rm", b.fingerprint.hex())
    assert [model["model"] for model in json.loads(call("ls", "--json"))] == ["a"]
    assert "in 2 blocks" in call("rm", "--all")
    assert "nothing is kept" in call("ls")


def test_another_folder_and_the_setting_are_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(tmp_path / "other", "c", blocks=1)
    assert "in 1 block of 1 model:" in call("du", "--kv-disk", str(tmp_path / "other"))
    monkeypatch.setenv("APPLIANCE_KV_DISK", str(tmp_path / "other"))
    assert "in 1 block of 1 model:" in call("du")
    monkeypatch.setenv("APPLIANCE_KV_DISK", "off")
    assert "in 0 blocks of 0 models:" in call("du")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rm"], "--all"),
        (["rm", "--all", "abc"], "leave one of them out"),
        (["rm", "abc"], "no model's id"),
        (["rm", "6"], "more than one model's id"),
        (["rm", "--older-than", "soon"], "not a duration"),
    ],
)
def test_what_is_not_clear_is_refused(root: Path, arguments: list[str], expected: str) -> None:
    store_of(root, "a", blocks=1)
    store_of(root, "b", blocks=1)
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert expected in str(result.exception)
    assert len(list(root.rglob("*.kv"))) == 2


def test_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['appliance', 'cache', 'ls']\n"
        "from appliance.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'fastapi', 'textual'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "APPLIANCE_CACHE_DIR": str(tmp_path)},
    )
    assert result.stdout.splitlines()[-1] == "[]"
