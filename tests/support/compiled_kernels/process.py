"""The kernels compiled in a process of their own: one that interprets Triton cannot compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent.parent


def compile_kernels(root: Path, output: Path) -> None:
    """Write the resources of all kernels, planted regressions included, to a file of JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(root / ".cache" / "triton")
    path = os.pathsep.join(filter(None, (str(SUPPORT), environment.get("PYTHONPATH"))))
    finished = subprocess.run(
        [sys.executable, "-m", "compiled_kernels", str(output), "--planted"],
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
