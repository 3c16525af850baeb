"""How a parallel run (`pytest -n`) shares the tests out: in units, of which the longest come first.

A unit is a file, but for what one child process runs, for clients of one server or browser, and for
files whose tests take long and share nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# What one child process runs, and waits for, in the worker that gets the first of its tests.
ONE_UNIT = "tests/kernels/executed"
# All its files ask one server, which each worker with one of them would start.
CLIENTS = "tests/e2e/clients"
# Files that share a browser, of which each worker with one of them would start its own.
IN_BROWSER = "tests/server/dashboard/test_page_in_browser.py"
# Their tests are units of their own.
BY_TEST = {"tests/kernels/executed/test_compiled_once.py"}
# Seconds of each unit in a whole run, by `scripts/test --store-durations`. A worker that begins a
# long one last leaves the others without work.
DURATIONS = Path(__file__).parents[3] / "durations.json"
LEAST_SECONDS = 5  # shorter ones are left out


def unit_of(nodeid: str) -> str:
    """Return the unit that a test belongs to: a file, a folder, or the test itself."""
    file = nodeid.split("::", 1)[0]
    if "[interpreter" in nodeid and file.startswith(f"{ONE_UNIT}/"):
        return ONE_UNIT
    if file.startswith(f"{CLIENTS}/"):
        return CLIENTS
    if file.endswith("_in_browser.py"):
        return IN_BROWSER
    return nodeid if file in BY_TEST else file


def durations() -> dict[str, int]:
    """Return the seconds that units took when they were last stored."""
    stored: dict[str, int] = json.loads(DURATIONS.read_text())
    return stored


def longest_first(items: list[pytest.Item], seconds: dict[str, int]) -> None:
    """Sort tests by what their unit takes, then files with slow ones before others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool]:
        return -seconds.get(unit_of(item.nodeid), 0), item.path not in slow

    items.sort(key=place)


class Stopwatch:
    """Adds up what units take in a run, for the runs after it."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[unit_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Store them, the longest first."""
        long = {
            unit: round(seconds)
            for unit, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
            if round(seconds) >= LEAST_SECONDS
        }
        DURATIONS.write_text(json.dumps(long, indent=1) + "\n")


class FileScheduling(LoadScopeScheduling):
    """Gives a worker that is about to run out of tests the next unit, as they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # it would begin with the most tests, however quick
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
