"""`appliance models` with a local replacement of the hub, in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs.forked_commands import ForkedCommands

FILES = {"a-Q4_0.gguf": b"GGUF" + bytes(5000), "b-Q8_0.gguf": b"GGUF" + bytes(200)}

# Runs all commands of a test in one process.
RUN = """
import json, sys
from typer.testing import CliRunner
from appliance.cli import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    error = "" if result.exception is None else str(result.exception)
    code = getattr(result.exception, "exit_code", result.exit_code)
    print(json.dumps([code, result.stdout, error]))
"""


Run = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture
def run(commands: ForkedCommands, hub: Any, tmp_path: Path) -> Run:
    def run(*words: str) -> list[tuple[int, str, str]]:
        asked = json.dumps([one.split() for one in words])
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        own = str(tmp_path / "own")
        result = commands.run(asked, code=RUN, APPLIANCE_CACHE_DIR=own, **places)
        assert result.returncode == 0, result.stderr
        answers = map(json.loads, result.stdout.splitlines())
        return [(code, out, error) for code, out, error in answers]

    return run


def test_pull_list_check_and_remove(run: Run, hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model"] = FILES
    pulled, listed, known, used, checked, removed, empty, none = run(
        "models pull org/model:a-Q4_0.gguf org/model@main:b-Q8_0.gguf",
        "models ls",
        "models ls --json",
        "models du",
        "models verify",
        "models rm org/model:a-Q4_0.gguf org/model:b-Q8_0.gguf",
        "models ls",
        "models rm org/model",
    )
    assert pulled[0] == 0
    assert "1 hash right" in pulled[1]
    assert listed[1].splitlines()[0].split() == ["model", "kind", "size", "last", "used"]
    names = {model["model"] for model in json.loads(known[1])["models"]}
    assert names == {"org/model:a-Q4_0.gguf", "org/model:b-Q8_0.gguf"}
    assert "in 2 files" in used[1]
    assert checked[1].count("1 file right") == 2
    assert removed[1].startswith("removed 2 models; ")
    assert "no model has been downloaded" in empty[1]
    assert (none[0], "none has been downloaded" in none[2]) == (3, True)


def test_what_pictures_are_read_with_comes_along(run: Run, hub: Any) -> None:
    hub.repos["org/eyes"] = FILES | {"mmproj-F16.gguf": b"GGUF" + bytes(900)}
    plain, known, pulled, listed, checked = run(
        "models pull --no-images org/eyes:a-Q4_0.gguf",
        "models ls --json",
        "models pull org/eyes:a-Q4_0.gguf",
        "models ls --json",
        "models verify",
    )
    assert "mmproj" not in plain[1]
    assert [len(model["files"]) for model in json.loads(known[1])["models"]] == [1]
    assert "and 0.0 MiB of mmproj-F16.gguf, 2 hashes right" in pulled[1]
    (model,) = json.loads(listed[1])["models"]
    assert (model["bytes"], len(model["files"])) == (5004 + 904, 2)
    assert "2 files right" in checked[1]
    assert sorted(hub.downloaded()) == ["a-Q4_0.gguf", "mmproj-F16.gguf"]


def test_what_a_model_drafts_with_comes_along(run: Run, hub: Any) -> None:
    hub.repos["org/head"] = FILES | {"mtp-a-Q4_0.gguf": b"GGUF" + bytes(700)}
    plain, pulled, listed, used, checked = run(
        "models pull --no-drafts org/head:a-Q4_0.gguf",
        "models pull org/head:a-Q4_0.gguf",
        "models ls --json",
        "models du",
        "models verify",
    )
    assert "mtp" not in plain[1]
    assert "and 0.0 MiB of mtp-a-Q4_0.gguf, 2 hashes right" in pulled[1]
    (model,) = json.loads(listed[1])["models"]
    assert (model["bytes"], len(model["files"])) == (5004 + 704, 2)
    assert "in 2 files" in used[1]
    assert "2 files right" in checked[1]


def test_a_damaged_file_is_named_with_what_to_do(run: Run, hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model"] = FILES
    run("models pull org/model:a-Q4_0.gguf")
    (file,) = tmp_path.glob("hub/models--org--model/snapshots/*/a-Q4_0.gguf")
    file.resolve().write_bytes(b"GGUF" + bytes(4999) + b"\1")
    checked, pulled = run("models verify", "models pull org/model:a-Q4_0.gguf")
    assert "1 of 1 file damaged" in checked[1]
    for code, _, error in (checked, pulled):
        assert code == 3
        assert "`appliance models rm org/model:a-Q4_0.gguf` and fetch it again" in error


def test_a_download_that_broke_off_goes_on_and_a_revision_must_exist(run: Run, hub: Any) -> None:
    hub.repos["org/model"] = FILES
    hub.shortened.add("a-Q4_0.gguf")
    broken, none, nothing = run(
        "models pull org/model:a-Q4_0.gguf",
        "models pull org/model@none:a-Q4_0.gguf",
        "models rm",
    )
    assert "start again, what is complete is kept" in broken[2]
    assert "org/model has no revision 'none'" in none[2]
    assert "name models from `appliance models ls`, or --unfinished" in nothing[2]
    hub.shortened.clear()
    ((code, out, _),) = run("models pull org/model:a-Q4_0.gguf")
    assert (code, "1 hash right" in out) == (0, True)
