"""The plan's memory is the process's memory, including interpreter and libraries.

This is the resident memory of one process: other processes on the machine, or libraries that they
share with it, do not change it. Each engine runs in a process of its own, started as the server
starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.runtime import ALLOCATOR, OPENMP

SCRIPT = Path(__file__).parents[1] / "support" / "support" / "engine" / "resident_engine.py"
SMALL = {"kv_cache_memory": 100 << 20, "max_model_len": 2048}


def run(model: Path, **settings: Any) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), json.dumps({"threads": 1, **settings})],
        env={**os.environ, **ALLOCATOR, **OPENMP},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["default", "bounded"])
def test_the_engine_takes_what_was_planned(smollm2_gguf: Path, settings: dict[str, Any]) -> None:
    found = run(smollm2_gguf, **settings)
    parts = found["parts"]
    planned = sum(parts.values())
    assert found["full"] == pytest.approx(planned, rel=0.05), found
    assert planned < found["of"]
    # After loading, only the cache and the workspace are missing.
    assert found["loaded"] == pytest.approx(parts["weights"] + parts["process"], rel=0.05), found
