"""Kernels compiled ahead of time, in a process of their own.

One that has imported an interpreting Triton cannot compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KERNEL_TESTS = Path(__file__).parent.parent / "kernels"  # has specs of its own


def compile_kernels(root: Path, output: Path, specs: list[str]) -> dict[str, dict[str, Any]]:
    """What every kernel of some specs takes, by name and compute capability."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(root / ".cache" / "triton")
    path = os.pathsep.join(filter(None, (str(KERNEL_TESTS), environment.get("PYTHONPATH"))))
    finished = subprocess.run(
        [sys.executable, "-m", "appliance.kernels.aot", str(output), "--spec", *specs],
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    kernels: dict[str, dict[str, Any]] = json.loads(output.read_text())["kernels"]
    return kernels
