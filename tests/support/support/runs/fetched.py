"""Tools that `scripts/test_tools` fetches outside our environment, which would conflict with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def python_clients() -> Path:
    """The programs of an environment with instructor and schemathesis."""
    return _fetched("python") / "bin"


def node_packages() -> Path:
    """The folder of Node packages; skips the test if Node is missing."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    return _fetched("node")


def pictures() -> Path:
    """The folder of scikit-image's pictures."""
    return _fetched("pictures")


def agent(name: str) -> Path:
    """A coding agent; skips the test if it was not fetched: the agents take 1.5 GB."""
    program = ROOT / ".cache/tools/agents/node_modules/.bin" / name
    if not program.exists():
        pytest.skip(f"no {name} is there; scripts/test_tools agents fetches it")
    return program


def _fetched(what: str) -> Path:
    command = [str(ROOT / "scripts/test_tools"), what]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.strip())
