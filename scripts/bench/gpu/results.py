"""Results of one run: a folder with a line of JSON for each measurement.

A line with the key `run` has the conditions under which the lines after it were measured. A later
line of the same key replaces an earlier one, so an interrupted run can resume in the same file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.supervisor import name_of

ROWS = "rows.jsonl"
Row = dict[str, Any]


def folder_name(device: str) -> str:
    """Derive a folder's name from torch's full name of the device.

    "NVIDIA H100 80GB HBM3" becomes "h100-80gb-hbm3".
    """
    words = re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")
    return words.removeprefix("nvidia-")


@dataclass
class Results:
    """The contents of a folder, which grow by lines.

    Attributes:
        path: of the file of lines.
        runs: conditions of each run, the latest last.
        ends: why each suite last stopped, empty if it was complete.
        rows: by suite and key.
    """

    path: Path
    runs: list[Row] = field(default_factory=list)
    ends: dict[str, Row] = field(default_factory=dict)
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read all complete lines."""
        results = cls(folder / ROWS)
        if results.path.exists():
            for line in results.path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                results._keep(row)
        return results

    def add(self, row: Row) -> None:
        """Append a line; once this returns, the line outlives this process."""
        self._keep(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _keep(self, row: Row) -> None:
        if "run" in row:
            self.runs.append(row["run"])
        elif "end" in row:
            self.ends[row["suite"]] = row
        else:
            self.rows[row["suite"], name_of(row["key"])] = row

    def done(self, suite: str) -> set[str]:
        """Return the names that a resumed run need not measure: all that did not fail."""
        return {
            name
            for (of, name), row in self.rows.items()
            if of == suite and "failed" not in row and "partial" not in row
        }

    def of(self, *suites: str) -> Iterator[Row]:
        """Return the rows of some suites in their order."""
        return (row for (suite, _), row in self.rows.items() if suite in suites)
