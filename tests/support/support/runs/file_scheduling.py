"""How a parallel run (`pytest -n`) distributes tests: in units, the longest first.

A unit is a file. Exceptions are the tests of one child process, the clients of one server or
browser, and files whose tests take long and share nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# One child process runs these tests; the worker that gets the first of them waits for it.
ONE_UNIT = "tests/kernels/executed"
# All files of this folder use one server, which each worker with one of them would start.
CLIENTS = "tests/e2e/clients"
# These files share a browser; each worker with one of them would start its own.
IN_BROWSER = "tests/server/dashboard/test_page_in_browser.py"
# Each test of these files is a unit.
BY_TEST = {"tests/kernels/executed/test_compiled_once.py"}
# Seconds of each unit in a whole run, by `scripts/test --store-durations`. A worker that begins a
# long one last leaves the others without work.
DURATIONS = Path(__file__).parents[3] / "durations.json"
LEAST_SECONDS = 5  # shorter units are not stored


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
    """Sort tests by the time of their unit, then files with slow tests before others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool]:
        return -seconds.get(unit_of(item.nodeid), 0), item.path not in slow

    items.sort(key=place)


class Stopwatch:
    """Adds up the time of each unit in a run, for later runs.

    Args:
        samples: files of which the run tries a part only; their units keep their stored time.
    """

    def __init__(self, samples: Collection[str] = ()) -> None:
        self._samples = samples
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[unit_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Store the times, the longest first."""
        kept = {
            unit: seconds
            for unit, seconds in durations().items()
            if any(name.startswith(unit.partition("::")[0]) for name in self._samples)
        }
        long = {
            unit: round(seconds)
            for unit, seconds in sorted({**self._seconds, **kept}.items(), key=lambda one: -one[1])
            if round(seconds) >= LEAST_SECONDS
        }
        DURATIONS.write_text(json.dumps(long, indent=1) + "\n")


class FileScheduling(LoadScopeScheduling):
    """Gives a worker that is about to run out of tests the next unit, in order of collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # it would put most tests first, however quick
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
