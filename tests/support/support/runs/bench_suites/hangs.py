from __future__ import annotations

import subprocess
from typing import Any


def measure(rows: Any, wanted: Any) -> None:
    """Wait for ever for a process that it has started."""
    rows.note({"kernel": "quick", "who": "ours"}, lambda: {"found": 1})
    rows.note({"kernel": "endless", "who": "ours"}, lambda: {"found": _wait(wanted)})


def _wait(wanted: Any) -> int:
    child = subprocess.Popen(["sleep", "600"])
    wanted.model.with_suffix(".pid").write_text(str(child.pid))
    return child.wait()
