"""A record of test files by a digest of their code, kept when all of their cases have passed.

While a digest is what the record says, the file tests what it tested then. It holds the text of the
file, of those beside it that pytest loads, of each module of ours that these import or that is
imported by one of those, in a function too, and the versions of the libraries that compute.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("numpy", "torch", "triton")

ROOT = Path(__file__).parents[4]
ROOTS = (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "ptx_machine")
EXECUTED = ROOT / "tests" / "kernels" / "executed"
RECORD = EXECUTED / "passed.json"


def check_selection(config: pytest.Config) -> None:
    """Refuse to write down that all cases passed when some would be left out, or not run.

    Raises:
        pytest.UsageError: `--executed=changed` with anything but the whole folder.
    """
    option = config.option
    chosen = [Path(config.invocation_params.dir, name).resolve() for name in config.args]
    narrowed = option.keyword or option.markexpr or option.deselect or option.ignore
    narrowed = narrowed or option.ignore_glob or getattr(option, "lf", False)
    narrowed = narrowed or option.collectonly or option.setuponly or option.setupplan
    if option.executed == "changed" and (chosen != [EXECUTED.resolve()] or narrowed):
        raise pytest.UsageError(
            "--executed=changed is for the whole folder: scripts/check_executed"
        )


@cache
def unchanged_in_run(config: pytest.Config) -> set[str]:
    """Return what a run leaves out, or shares out: found by the process that starts the workers."""
    if config.option.executed == "all":
        return set()
    if hasattr(config, "workerinput"):
        return set(config.workerinput["unchanged"])
    return unchanged()


def unchanged(record: Path = RECORD, folder: Path = EXECUTED) -> set[str]:
    """Return the names of a folder's test files that are what they are in the record."""
    kept = json.loads(record.read_text()) if record.exists() else {}
    return {file.name for file in folder.glob("test_*.py") if kept.get(file.name) == digest(file)}


def renew(record: Path = RECORD, folder: Path = EXECUTED) -> None:
    """Write down a folder's test files as they are now."""
    digests = {file.name: digest(file) for file in sorted(folder.glob("test_*.py"))}
    record.write_text(json.dumps(digests, indent=1) + "\n")


def digest(file: Path, roots: tuple[Path, ...] = ROOTS) -> str:
    """Return the digest of a test file's code."""
    found = hashlib.sha256(
        " ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES).encode()
    )
    for text in sorted(map(_digest_of_file, code_of(file, roots))):
        found.update(text)
    return found.hexdigest()[:20]


def code_of(file: Path, roots: tuple[Path, ...] = ROOTS) -> set[Path]:
    """Return the files whose code a test file runs."""
    found = {file, *file.parent.glob("conftest.py"), *file.parent.glob("plugins/*.py")}
    waiting = list(found)
    while waiting:
        new = imported(waiting.pop(), roots) - found
        found |= new
        waiting += new
    return found


@cache
def imported(file: Path, roots: tuple[Path, ...]) -> frozenset[Path]:
    """Return the files of ours that one imports, its packages included; not for type checkers."""
    return frozenset(
        found
        for name in _names(ast.parse(file.read_bytes()).body)
        for root in roots
        for found in _files(name, root)
    )


def _names(body: Sequence[Any]) -> Iterator[str]:
    """Yield the modules that statements import, and what might be one of a package's."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _names(statement.orelse)
        else:
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _names(getattr(statement, block, ()))


def _files(name: str, root: Path) -> Iterator[Path]:
    """Yield the files of a module and of the packages that it is in; none that are not there."""
    place = root
    for part in name.split("."):
        place /= part
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


@cache
def _digest_of_file(file: Path) -> bytes:
    return hashlib.sha256(file.name.encode() + b"\n" + file.read_bytes()).digest()
