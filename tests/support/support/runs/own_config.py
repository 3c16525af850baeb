"""Fixtures that leave a test no configuration but its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

WriteConfig = Callable[[str], Path]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove our variables, and use a configuration folder of the test's own."""
    for variable in os.environ:
        if variable.startswith("APPLIANCE_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Write the configuration file at its usual path, readable by this user alone."""

    def write(text: str) -> Path:
        path = tmp_path / "config" / "appliance" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write
