"""The command line that all benchmarks share, and their result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--out`, described by the first paragraph of a module's docstring."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


def write_result(path: Path | None, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Print the result unless `quiet`, and write it to `path` if there is one."""
    text = json.dumps(result, indent=2)
    if not quiet:
        print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
