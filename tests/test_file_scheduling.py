"""How a parallel run distributes the tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.runs import file_scheduling
from support.runs.file_scheduling import (
    BY_TEST,
    CLIENTS,
    IN_BROWSER,
    ONE_UNIT,
    Stopwatch,
    durations,
    longest_first,
    unit_of,
)

COPY = f"{ONE_UNIT}/test_block_copy.py::test_copy"
ONCE = "tests/kernels/executed/test_compiled_once.py::test_it"


def test_a_unit_is_a_file_or_what_one_child_runs_or_a_long_test() -> None:
    assert unit_of("tests/test_log.py::test_it[interpreter]") == "tests/test_log.py"
    assert unit_of(f"{COPY}[interpreter-int8]") == ONE_UNIT
    assert unit_of(f"{COPY}[sm_86-int8]") == f"{ONE_UNIT}/test_block_copy.py"
    assert unit_of(f"{ONCE}[awq]") == f"{ONCE}[awq]"
    assert unit_of(f"{CLIENTS}/test_node.py::test_it") == CLIENTS
    assert unit_of("tests/server/dashboard/test_docs_in_browser.py::test_it") == IN_BROWSER


def test_what_is_named_is_there(pytestconfig: pytest.Config) -> None:
    assert all((pytestconfig.rootpath / name).exists() for name in BY_TEST)


def test_the_longest_come_first_and_slow_files_before_others() -> None:
    def item(nodeid: str, *, slow: bool = False) -> Any:
        path = Path(nodeid.split("::")[0])
        marker = object() if slow else None
        return SimpleNamespace(nodeid=nodeid, path=path, get_closest_marker=lambda _: marker)

    wanted = [
        f"{COPY}[interpreter]",
        "tests/kernels/cpu/test_sanitizers.py::test_c",
        f"{ONCE}[awq]",
        f"{COPY}[sm_86]",  # from a file with a slow test
        "tests/test_slow.py::test_slow",
        "tests/test_slow.py::test_quick",
        "tests/test_a.py::test_b",
    ]
    seconds = {
        ONE_UNIT: 80,
        f"{ONCE}[awq]": 20,
        "tests/kernels/cpu/test_sanitizers.py": 30,
        "tests/gone.py": 9,
    }
    slow = {f"{COPY}[interpreter]", f"{COPY}[sm_86]", "tests/test_slow.py::test_slow"}
    items = [item(name, slow=name in slow) for name in (*wanted[4:], *wanted[:4])]
    items.sort(key=lambda one: "test_a" not in one.nodeid)
    longest_first(cast("list[pytest.Item]", items), seconds)
    found = [one.nodeid for one in items]
    assert found[:3] == wanted[:3]
    assert set(found[3:6]) == set(wanted[3:6])
    assert found[6] == wanted[6]
    assert found.index(wanted[4]) + 1 == found.index(wanted[5]), "a file stays together"


def test_what_a_run_took_is_what_the_next_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_scheduling, "DURATIONS", tmp_path / "durations.json")
    sample, executed = "tests/test_sweep.py", f"{ONE_UNIT}/test_block_copy.py"
    stored = {ONE_UNIT: 270, executed: 40, sample: 20, "tests/test_b.py": 30, "tests/gone.py": 8}
    file_scheduling.DURATIONS.write_text(json.dumps(stored))
    watch = Stopwatch({sample, executed})
    for name, seconds in (
        ("a.py::one", 3.0),
        ("b.py::one", 9.6),
        ("a.py::two", 3.0),
        ("c.py::x", 1),
        ("sweep.py::x", 7),
    ):
        report = SimpleNamespace(nodeid=f"tests/test_{name}", duration=seconds)
        watch.pytest_runtest_logreport(cast("pytest.TestReport", report))
    watch.pytest_sessionfinish()
    whole = {ONE_UNIT: 270, executed: 40, sample: 20}  # only a sample of these ran
    assert durations() == whole | {"tests/test_b.py": 10, "tests/test_a.py": 6}
