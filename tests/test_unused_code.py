"""`scripts/check` finds product code that nothing of the product calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("appliance", "kernels", "quant", "tui")


def vulture(*more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vulture", *PRODUCT, *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_nothing_is_without_a_caller() -> None:
    found = vulture()
    assert not found.returncode, found.stdout


def test_a_function_without_a_caller_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def nobody_calls_this() -> None: ...\n")
    found = vulture(str(planted))
    assert found.returncode
    assert "unused function 'nobody_calls_this'" in found.stdout


def test_the_check_runs_it() -> None:
    assert ".venv/bin/vulture" in (ROOT / "scripts" / "check").read_text().splitlines()
