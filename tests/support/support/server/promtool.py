"""Prometheus' own checker, which `scripts/test` fetches if it may."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[4] / ".cache" / "tools" / "promtool"


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; skips the test if it is missing."""
    found = shutil.which("promtool") or (str(FETCHED) if FETCHED.exists() else None)
    if found is None:
        pytest.skip("no promtool is installed; scripts/test_tools fetches it on Debian")
    return subprocess.run(
        [found, *arguments], input=text, capture_output=True, text=True, check=False, timeout=300
    )
