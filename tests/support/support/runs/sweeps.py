"""Sweeps: test files that try every case of what seldom changes, and take minutes.

While the code of one is what the record says, it would test what it tested when all of its cases
passed, and a run tries a sample of them, which is another one in each commit. A digest holds the
text of the file, of those beside it that pytest loads, of each module of ours that these import or
that is imported by one of those, in a function too, of the JSON beside all these, and the versions
of the libraries that compute.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.runs.turns import sample, seed_of_tree

LIBRARIES = ("numpy", "torch", "transformers", "triton")

ROOT = Path(__file__).parents[4]
ROOTS = (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "ptx_machine")
LIBRARY = "kernels/cpu/src/**/*.[ch]"
# What each sweep runs besides the modules that it imports.
SWEEPS: dict[str, tuple[str, ...]] = {
    "tests/kernels/executed/test_*.py": (),
    "tests/kernels/cpu/test_*.py": (
        LIBRARY,
        "tests/kernels/cpu/*.py",
        "tests/kernels/cpu/*.c",
        "tests/model/test_config_door.py",  # that sanitizers watch, too
    ),
    "tests/engine/test_own_caches.py": (LIBRARY,),
    # Families and executors are imported by name.
    "tests/model/**/test_*.py": (
        LIBRARY,
        "tests/model/conftest.py",
        "appliance/model/**/*.py",
        "kernels/**/*.py",
        "quant/formats/*.py",
    ),
    # Methods are imported by name, and commands are run, which are found by theirs.
    "tests/quant/**/test_*.py": (
        LIBRARY,
        "tests/quant/conftest.py",
        "quant/**/*.py",
        "quant/text/samples/*",
        "appliance/tokenizer/*.py",  # whose names load on first use
        "appliance/__main__.py",
        "appliance/commands/quantize.py",
        "appliance/commands/evaluate.py",
        "appliance/commands/card.py",
        "appliance/commands/repack.py",
    ),
}
RECORD = ROOT / "tests" / "sweeps.json"
ONE_IN = 48  # cases whose code has not changed, in each run


def files(root: Path = ROOT) -> list[Path]:
    """Return the files of all sweeps."""
    return sorted(file for pattern in SWEEPS for file in root.glob(pattern))


def check_selection(config: pytest.Config) -> None:
    """Refuse to write down that all cases passed when some would be left out, or not run.

    Raises:
        pytest.UsageError: `--sweeps=changed` with anything but all files whole.
    """
    option = config.option
    chosen = {Path(config.invocation_params.dir, name).resolve() for name in config.args}
    narrowed = option.keyword or option.markexpr or option.deselect or option.ignore
    narrowed = narrowed or option.ignore_glob or getattr(option, "lf", False)
    narrowed = narrowed or option.collectonly or option.setuponly or option.setupplan
    if option.sweeps == "changed" and (chosen != set(files()) or narrowed):
        raise pytest.UsageError("--sweeps=changed is for all of them: scripts/check_sweeps")


@cache
def unchanged_in_run(config: pytest.Config) -> set[str]:
    """Return what a run leaves out, or shares out: found by the process that starts the workers."""
    if config.option.sweeps == "all":
        return set()
    if hasattr(config, "workerinput"):
        return set(config.workerinput["unchanged"])
    return unchanged()


def leave_out_unchanged(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave of files whose code has not changed what the run wants of them."""
    names = unchanged_in_run(config)
    cases = [item.nodeid for item in items if item.nodeid.split("::")[0] in names]
    kept: list[str] = []
    if cases and config.option.sweeps == "by-turns":
        kept = sample(cases, ONE_IN, seed_of_tree())
    left_out = {*cases} - {*kept}
    items[:] = [item for item in items if item.nodeid not in left_out]


def unchanged(record: Path = RECORD, root: Path = ROOT) -> set[str]:
    """Return the names of the files, from the root, that are what they are in the record."""
    kept = json.loads(record.read_text()) if record.exists() else {}
    return {name for name, now in digests(root).items() if kept.get(name) == now}


def renew(record: Path = RECORD, root: Path = ROOT) -> None:
    """Write down all files as they are now."""
    record.write_text(json.dumps(digests(root), indent=1) + "\n")


def digests(root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each file, by its name from the root."""
    return {
        str(file.relative_to(root)): digest(file, besides_of(file, root)) for file in files(root)
    }


def besides_of(file: Path, root: Path = ROOT) -> tuple[Path, ...]:
    """Return what a sweep runs besides the modules that it imports."""
    globs = [glob for pattern in SWEEPS if file in root.glob(pattern) for glob in SWEEPS[pattern]]
    return tuple(beside for glob in globs for beside in sorted(root.glob(glob)))


def digest(file: Path, besides: Sequence[Path] = (), roots: tuple[Path, ...] = ROOTS) -> str:
    """Return the digest of a test file's code, and of what else it runs."""
    found = hashlib.sha256(
        " ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES).encode()
    )
    code = code_of(file, besides, roots)
    data = {beside for folder in {one.parent for one in code} for beside in folder.glob("*.json")}
    for text in sorted(map(_digest_of_file, code | data)):
        found.update(text)
    return found.hexdigest()[:20]


def code_of(file: Path, besides: Sequence[Path] = (), roots: tuple[Path, ...] = ROOTS) -> set[Path]:
    """Return the files whose code a test file runs."""
    found = {file, *file.parent.glob("conftest.py"), *file.parent.glob("plugins/*.py"), *besides}
    waiting = [one for one in found if one.suffix == ".py"]
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


@cache
def _files(name: str, root: Path) -> frozenset[Path]:
    """Return the files of a module and of the packages that it is in; none that are not there."""
    package, _, part = name.rpartition(".")
    found = _files(package, root) if package else frozenset()
    place = root / package.replace(".", "/")
    if package and not place.is_dir():
        return found
    files = place / f"{part}.py", place / part / "__init__.py"
    return found | {file for file in files if file.is_file()}


@cache
def _digest_of_file(file: Path) -> bytes:
    return hashlib.sha256(file.name.encode() + b"\n" + file.read_bytes()).digest()


if __name__ == "__main__":
    sys.stdout.writelines(f"{file}\n" for file in files())
