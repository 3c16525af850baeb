"""`scripts/check` finds product code that nothing in the product calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_function_without_a_caller_is_found(tmp_path: Path) -> None:
    """The check itself, which runs beside the tests, shows that the product has none."""
    planted = tmp_path / "planted.py"
    planted.write_text("def nobody_calls_this() -> None: ...\n")
    command = [sys.executable, "-m", "vulture", str(planted)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode
    (line,) = found.stdout.splitlines()
    assert "unused function 'nobody_calls_this'" in line


def test_the_check_runs_it() -> None:
    assert ".venv/bin/vulture" in (ROOT / "scripts" / "check").read_text().splitlines()
