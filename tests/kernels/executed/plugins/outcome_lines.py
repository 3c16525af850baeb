"""Writes one JSON line for every test, as soon as it is over: a crash loses only what follows."""

from __future__ import annotations

import json

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome-lines", required=True)


class OutcomeLines:
    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext}
        with open(self.path, "a") as lines:
            lines.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OutcomeLines(config.getoption("--outcome-lines")))
