"""The process that keeps a GPU benchmark's results survives whatever measures them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

BENCH = Path(__file__).parent.parent / "scripts" / "bench"

WORKER = """
import os, signal, sys, time
from gpu_supervisor import START_AGAIN, name_of, tell, told
done = told()
tell(facts=len(done))
print("a library talks")
for number, kind in enumerate(sys.argv[1:]):
    key = {"number": number}
    if name_of(key) in done:
        continue
    tell(begin=key)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hangs":
        tell(hangs=number)
        time.sleep(1000)
    tell(row={**key, "found": kind})
    if kind == "spoils":
        sys.exit(START_AGAIN)
"""


def supervise(
    tmp_path: Path,
    *kinds: str,
    done: tuple[int, ...] = (),
    time_is_up: bool = False,
) -> tuple[str, list[dict[str, Any]], list[int]]:
    """Why it stopped, the rows, and what was done already each time that a process began.

    Args:
        tmp_path: for the worker's program.
        kinds: what each measurement does.
        done: those that need no measuring any more.
        time_is_up: once one hangs; otherwise patience with it is.
    """
    spec = importlib.util.spec_from_file_location("gpu_supervisor", BENCH / "gpu_supervisor.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    messages: list[dict[str, Any]] = []

    def take(message: dict[str, Any]) -> None:
        messages.append(message)
        if "hangs" in message and time_is_up:
            supervisor.deadline = time.monotonic()
        elif "hangs" in message:
            supervisor.patience = 0.1
        else:
            supervisor.patience = LIMIT

    supervisor = module.Supervisor(
        command=(sys.executable, str(worker), *kinds),
        environment={**os.environ, "PYTHONPATH": str(BENCH)},
        take=take,
        done={module.name_of({"number": number}) for number in done},
        patience=LIMIT,
        deadline=time.monotonic() + 10 * LIMIT,
    )
    stopped = supervisor.run()
    rows = [message["row"] for message in messages if "row" in message]
    return stopped, rows, [message["facts"] for message in messages if "facts" in message]


def test_what_dies_or_hangs_costs_itself_alone(tmp_path: Path) -> None:
    stopped, rows, starts = supervise(tmp_path, "a", "dies", "spoils", "hangs", "b", done=(0,))
    assert stopped == ""
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert "ended with code -11" in rows[0]["failed"]
    assert "nothing was heard" in rows[2]["failed"]
    assert [row.get("found") for row in rows] == [None, "spoils", None, "b"]
    assert starts == [1, 2, 3, 4]


def test_when_the_time_is_over_what_there_is_stays(tmp_path: Path) -> None:
    stopped, rows, _ = supervise(tmp_path, "a", "hangs", "b", time_is_up=True)
    assert stopped == "the time is over"
    assert [row["number"] for row in rows] == [0]


def test_a_process_that_measures_nothing_is_not_started_for_ever(tmp_path: Path) -> None:
    stopped, rows, _ = supervise(tmp_path, "spoils", "spoils", done=(0, 1))
    assert (stopped, rows) == ("", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "WORKER", "raise SystemExit(1)")
        stopped, rows, _ = supervise(tmp_path, "a")
    assert stopped == "its process ends before it has measured anything"
    assert rows == []


def test_a_script_finds_the_package_where_the_code_was_only_copied_to(tmp_path: Path) -> None:
    without_packages = tmp_path / "python"
    without_packages.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    without_packages.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text("import appliance; print(appliance.__file__)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        ["bash", "-c", f'source scripts/bench/python_for_gpu; "$python" {script}'],
        cwd=BENCH.parent.parent,
        env={**environment, "PYTHON": str(without_packages), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip().endswith("appliance/__init__.py"), found.stderr
