"""Conditions of a measurement: machine, versions, load, and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from appliance.bench.report import machine_facts

ROOT = Path(__file__).parents[3]


def conditions() -> dict[str, Any]:
    """Return the conditions of this run."""
    commit = _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "-s") else "")
    return {"commit": commit, **machine_facts()}


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # a machine that the code was only copied to
        return ""
    return result.stdout.strip()
