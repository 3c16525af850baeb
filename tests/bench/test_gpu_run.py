"""A run as a whole: a failing suite harms only itself, and a run that was cut off resumes."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import run
from bench.gpu.plan import COMPILE_SECONDS, MINUTES, SUITES, Amount, Suite, Wanted, deadlines
from bench.gpu.results import Results, folder_name

BAD = tuple(
    Suite(name, 20, patience, name, package="support.runs.bench_suites")
    for name, patience in (("crashes", 60), ("hangs", 8), ("works", 60))
)


def settings(folder: Path, *, resume: bool = False, suites: tuple[Suite, ...] = BAD) -> Any:
    wanted = Wanted(Amount.TINY, model=folder / "model")
    return run.Settings(suites, wanted, folder, None, 10, resume, 1, 1)


@pytest.fixture
def a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the test's end restores it
    monkeypatch.setattr(run, "device_facts", lambda: {"device": "cpu"})


def found(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = Results.read(folder / "cpu").rows
    return {(suite, row["key"]["kernel"]): row for (suite, _), row in rows.items()}


@pytest.mark.usefixtures("a_trial")
def test_suites_that_crash_or_hang_harm_no_other_and_are_measured_again(tmp_path: Path) -> None:
    assert not run.run(settings(tmp_path))
    rows = found(tmp_path)
    assert "code -11" in rows["crashes", "deadly"]["failed"]
    assert rows["crashes", "harmless"]["found"] == 1
    assert rows["crashes", "wrong"]["failed"].startswith("KeyError")
    assert rows["hangs", "quick"]["found"] == 1
    assert "nothing was heard" in rows["hangs", "endless"]["failed"]
    assert [rows["works", name]["found"] for name in "01"] == [0, 1]
    child = int((tmp_path / "model.pid").read_text())
    assert not Path(f"/proc/{child}/cmdline").exists() or not _runs(child)

    report = json.loads((tmp_path / "cpu" / "report.json").read_text())
    assert len(report["failed"]) == 3
    assert "NO" not in (tmp_path / "cpu" / "report.md").read_text()

    with pytest.raises(SystemExit, match="--resume"):
        run.run(settings(tmp_path))
    (tmp_path / "model").touch()  # from now on it no longer crashes
    lines = len((tmp_path / "cpu" / "rows.jsonl").read_text().splitlines())
    run.run(settings(tmp_path, resume=True, suites=(BAD[0], BAD[2])))
    assert found(tmp_path)["crashes", "deadly"]["found"] == "alive"
    added = (tmp_path / "cpu" / "rows.jsonl").read_text().splitlines()[lines:]
    # The run, the two that had failed, and the ends of two suites: nothing else was measured again.
    assert len(added) == 1 + 2 + 2, added


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_no_suite_takes_time_from_another() -> None:
    shares = [COMPILE_SECONDS, *(suite.seconds for suite in SUITES)]
    limits = deadlines(shares, 60 * MINUTES)
    assert limits[-1] == pytest.approx(60 * MINUTES)
    for share, (before, after) in zip(shares[1:], pairwise(limits), strict=True):
        assert after - before >= 0.98 * share
        # A measurement that hangs leaves time for the others of its suite.
    assert all(suite.patience <= suite.seconds for suite in SUITES)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("cpu", "cpu"),
    ],
)
def test_a_folder_has_the_device_s_full_name(device: str, name: str) -> None:
    assert folder_name(device) == name


def test_a_line_that_was_cut_off_costs_itself(tmp_path: Path) -> None:
    results = Results.read(tmp_path)
    results.add({"run": {"gpu": {}}})
    results.add({"suite": "matmul", "key": {"m": 1}, "us": 1})
    with results.path.open("a") as file:
        file.write('{"suite": "matmul", "key": {"m"')
    again = Results.read(tmp_path)
    assert [row["us"] for row in again.of("matmul")] == [1]
    assert again.done("matmul") == {'{"m": 1}'}


def test_wheels_are_imported_from_where_they_are_unpacked(tmp_path: Path) -> None:
    import zipfile

    assert run.packages_in(tmp_path) == tmp_path
    with zipfile.ZipFile(tmp_path / "some-1.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "")
    unpacked = run.packages_in(tmp_path)
    assert (unpacked / "some" / "__init__.py").exists()
    assert os.path.commonpath([unpacked, tmp_path]) != str(tmp_path)
