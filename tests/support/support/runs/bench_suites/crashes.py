from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def measure(rows: Any, wanted: Any) -> None:
    """Die in the first measurement, unless the model's file says otherwise."""

    def die() -> dict[str, Any]:
        if not Path(wanted.model).exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"found": "alive"}

    rows.note({"kernel": "deadly", "who": "ours"}, die)
    rows.note({"kernel": "harmless", "who": "ours"}, lambda: {"found": 1})
    rows.note({"kernel": "wrong", "who": "a peer"}, lambda: dict[str, Any]()["missing"])
