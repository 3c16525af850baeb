"""The documentation, which ships with the package: a page of Markdown for each topic.

Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
# In the order of a reader's questions.
NAMES = (
    "clients", "models", "sizing", "sleep", "dashboard", "quantize", "trellis", "adapters",
    "memory-and-cache",
        "ranks",
        "replicas",
        "cluster",
        "settings",
        "api",
        "security",
        "operations",
        "benchmarks",
        "architecture",
        "extending",
        "contributing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Topic:
    name: str  # as in `appliance docs NAME`
    title: str
    text: str  # Markdown; links to other topics name their files


def read(name: str) -> Topic:
    """A page of `NAMES`."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return Topic(name, text.partition("\n")[0].removeprefix("# "), text)
