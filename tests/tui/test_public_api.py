"""The dashboard uses Textual and Rich as documented, by public names only."""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path

import pytest

TUI = Path(__file__).parent.parent.parent / "tui"
FILES = sorted(TUI.rglob("*.py"))
THEIRS = ("textual", "rich")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_imports(tree: ast.AST) -> set[str]:
    """Modules and names of these packages that begin with an underscore."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package in THEIRS and any(map(is_private, parts)):
                found.add(name)
    return found


def foreign_accesses(tree: ast.AST) -> set[str]:
    """Private attributes of anything except the object or class itself."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a class defines, or reads or sets on itself."""
    named = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(node.name)
    }
    return named | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr)
    }


@cache
def private_names_of(kind: type) -> frozenset[str]:
    """Private names of one of these packages' classes, including attributes of instances."""
    return frozenset(own_names(ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TUI)))
def test_nothing_private_of_other_packages_is_used(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not private_imports(tree)
    assert not foreign_accesses(tree), "of an object that is not its own"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TUI)))
def test_no_class_overrides_or_reads_what_is_private_in_its_base(file: Path) -> None:
    dotted = ".".join(("appliance", "tui", *file.relative_to(TUI).with_suffix("").parts))
    module = importlib.import_module(dotted.removesuffix(".__init__"))
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef) or not hasattr(module, node.name):
            continue
        ours = own_names(node)
        for base in getattr(module, node.name).__mro__:
            if base.__module__.split(".")[0] in THEIRS:
                assert not ours & private_names_of(base), f"of {base.__qualname__}"


def test_this_finds_what_it_looks_for() -> None:
    tree = ast.parse(
        "from textual._compositor import X\n"
        "from rich.console import _y\n"
        "from __future__ import annotations\n"
        "app._display(1)\n"
        "self._mine = app.console\n"
    )
    assert private_imports(tree) == {"textual._compositor.X", "rich.console._y"}
    assert foreign_accesses(tree) == {"app._display"}
    app = importlib.import_module("textual.app").App
    assert {"_display", "_filters", "_fatal_error"} <= private_names_of(app)
