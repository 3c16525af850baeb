"""No configuration, cache or hub except the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.own_config import clean_environment, write_config

from appliance.doctor.finding import Check, Finding, Scope

__all__ = ["clean_environment", "write_config"]


@pytest.fixture(autouse=True)
def _own_folders(clean_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def look() -> Callable[[Check, Scope], dict[str, Finding]]:
    """Run one check; return its findings by name."""

    def run(check: Check, scope: Scope) -> dict[str, Finding]:
        return {finding.name: finding for finding in check(scope)}

    return run
