from __future__ import annotations

from typing import Any


def measure(rows: Any, wanted: Any) -> None:
    for number in range(2):
        rows.note({"kernel": f"{number}", "who": "ours"}, lambda number=number: {"found": number})
