"""The results of one run in one folder: a line of JSON for each thing that was found, at once.

A line of a run says under which conditions the lines after it were measured; a later line of the
same key replaces an earlier one, so a run that was cut off can be resumed in the same file.
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
    """Name of a device's folder from what torch calls the device, in full.

    "NVIDIA H100 80GB HBM3" becomes "h100-80gb-hbm3".
    """
    words = re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")
    return words.removeprefix("nvidia-")


@dataclass
class Results:
    """What a folder holds, and the end of it that grows.

    Attributes:
        path: of the file of lines.
        runs: conditions of each run, the latest last.
        ends: why each suite stopped at last, empty if it came to its end.
        rows: by suite and key.
    """

    path: Path
    runs: list[Row] = field(default_factory=list)
    ends: dict[str, Row] = field(default_factory=dict)
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """All that is there; a last line that was cut off does not count."""
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
        """Keep and write a line; it is on its way to the disk when this returns."""
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
        """Names of what a resumed run does not measure again: all that did not fail."""
        return {
            name
            for (of, name), row in self.rows.items()
            if of == suite and "failed" not in row and "partial" not in row
        }

    def of(self, *suites: str) -> Iterator[Row]:
        """The rows of some suites, in the order in which they were found."""
        return (row for (suite, _), row in self.rows.items() if suite in suites)
