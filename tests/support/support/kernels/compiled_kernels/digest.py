"""A digest of everything that a compiled kernel's code depends on: equal digests, equal code.

It holds the text of the kernel and of every function it calls, without comments and docstrings; the
values of the constants they read; how the kernel is specialized, for which architecture and by
which triton; and the text of the modules that lower the kernel and that read the machine code.
Triton's version stands for its own functions. A value that it cannot classify raises, so that
nothing is left out silently.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from support.kernels.compiled_kernels.signature import KernelSignature

# These fields of a signature name the row, locate its kernel or judge it; the compiler does not see
# them.
_NOT_COMPILED = {"name", "module", "loop_elements"}
_PLAIN = (bool, int, float, str, bytes, type(None), Enum)


def digest(
    signature: KernelSignature,
    capability: int,
    triton: str,
    readers: tuple[str, ...] = ("compile",),
) -> str:
    """Return the digest of one row of a table that this version of triton makes.

    Args:
        signature: of the row.
        capability: of the row.
        triton: the version.
        readers: modules beside this one that read the machine code.
    """
    kernel = getattr(importlib.import_module(signature.module), signature.function)
    parts: dict[str, object] = {
        field.name: _canonical(getattr(signature, field.name))
        for field in fields(signature)
        if field.name not in _NOT_COMPILED
    }
    parts |= {
        "capability": capability,
        "triton": triton,
        "sources": list(sources(kernel).values()),
        "readers": [reader_digest(reader) for reader in ("lower", *readers)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


@cache
def sources(kernel: Any) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the text of a kernel and all functions it calls, each with the constants it reads.

    The keys are full names, in the order in which a reader comes to them. The digest omits the
    names, so that a function may move to another file.
    """
    found: dict[str, tuple[str, dict[str, str]]] = {}
    waiting = [kernel.fn]
    while waiting:
        function = waiting.pop()
        name = f"{function.__module__}.{function.__qualname__}"
        if name in found:
            continue
        tree = _tree(inspect.getsource(function))
        constants: dict[str, str] = {}
        found[name] = ast.unparse(tree), constants
        for read, value in _reads(tree, function):
            called, constant = _place(read, value)
            if called is not None:
                waiting.append(called)
            if constant is not None:
                constants[read] = constant
    return found


def _tree(source: str) -> ast.Module:
    """Parse a source and remove its docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _reads(tree: ast.Module, function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield each global that a function reads: its name with dots, and its value.

    A global counts even if a local variable hides it: rather too much than too little.
    """
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(scope.get(node.id), ModuleType):
            if node.id in scope:
                yield node.id, scope[node.id]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            root, *path = name.split(".")
            value = scope.get(root)
            if all(part.isidentifier() for part in path) and isinstance(value, ModuleType):
                for part in path:
                    if _is_of_triton(value):
                        break
                    value = getattr(value, part)
                yield name, value


def _place(name: str, value: Any) -> tuple[FunctionType | None, str | None]:
    """Return a value as a function, or else as text; neither if triton's version covers it.

    Raises:
        TypeError: it is neither.
    """
    if _is_of_triton(value) or isinstance(value, ModuleType):
        return None, None  # of a module, only the values read from it count
    if isinstance(getattr(value, "fn", None), FunctionType):
        return (None if _is_of_triton(value.fn) else value.fn), None
    if type(value).__name__ == "constexpr":
        return _place(name, value.value)
    if isinstance(value, type) and not issubclass(value, Enum):
        raise TypeError(f"{name} is a class: the digest of a kernel cannot hold it")
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return None, None
    return None, json.dumps(_canonical(value))


def _is_of_triton(value: object) -> bool:
    """Whether triton defines a module, function or class; False for instances such as a dtype."""
    is_named = isinstance(value, ModuleType | FunctionType | type)
    if is_named or type(value).__name__ == "JITFunction":
        module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
        return str(module).split(".")[0] in ("triton", "math")
    return False


def _canonical(value: Any) -> object:
    """Return a value as JSON can hold it, with its type.

    Raises:
        TypeError: its text would not describe it fully.
    """
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_canonical(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value).__module__.startswith("triton.language") and " at 0x" not in repr(value):
        return repr(value)  # a dtype
    raise TypeError(f"the digest of a kernel cannot hold {value!r}")


@cache
def reader_digest(reader: str) -> str:
    module = importlib.import_module(f"{__package__}.{reader}")
    tree = _tree(inspect.getsource(module))
    imports = ast.Import | ast.ImportFrom | ast.If  # the last one imports for types alone
    tree.body = [node for node in tree.body if not isinstance(node, imports)]
    return ast.unparse(tree)
