"""The digest of a compiled kernel changes with everything that its code depends on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.kernels.compiled_kernels import digest as digests
from support.kernels.compiled_kernels.digest import digest, sources
from support.kernels.compiled_kernels.signature import KernelSignature
from support.kernels.compiled_kernels.table import ORDERS, every_signature
from triton.runtime import jit

CONSTANTS = '''
"""Shared by kernels."""

import triton.language as tl

WIDTH: tl.constexpr = tl.constexpr(32)
ORDER: tl.constexpr = tl.constexpr((0, 2, 1))
TEXT = "add.u32 $0, $1, 1;"
'''
HELPERS = '''
import triton
import triton.language as tl

SMALL: tl.constexpr = tl.constexpr(1e-5)

@triton.jit
def far(x):
    return x + SMALL

@triton.jit
def near(x, UNUSED: tl.constexpr = 4):
    """Says nothing."""
    return far(x) * 2.0

@triton.jit
def uncalled(x):
    return x
'''
KERNEL = """
import triton
import triton.language as tl
from digested import constants
from digested.constants import TEXT
from digested.helpers import near

_ASM: tl.constexpr = tl.constexpr(TEXT)

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK) * constants.WIDTH)
    x = tl.permute(near(x), constants.ORDER)
    x = tl.inline_asm_elementwise(_ASM, "=r,r", [x], tl.uint32, is_pure=True, pack=1)
    tl.store(x_ptr + n, tl.sum(x))
"""
FILES = {"constants.py": CONSTANTS, "helpers.py": HELPERS, "kernel.py": KERNEL, "__init__.py": ""}
SIGNATURE = KernelSignature(
    name="row",
    module="digested.kernel",
    function="kernel",
    types={"x_ptr": "*fp32", "n": "i32"},
    constexprs={"BLOCK": 64},
    multiples_of_16=frozenset({"n"}),
    num_warps=4,
    num_stages=2,
)
Digest = Callable[..., str]


@pytest.fixture
def of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """Digest of SIGNATURE in a package, with some of its source texts replaced."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "digested"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def of(file: str = "", old: str = "", new: str = "") -> str:
        forget()
        number = len(list(tmp_path.iterdir()))
        folder = tmp_path / str(number) / "digested"
        folder.mkdir(parents=True)
        for name, text in FILES.items():
            assert name != file or old in text
            (folder / name).write_text(text.replace(old, new) if name == file else text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder.parent))
            return digest(SIGNATURE, 86, "3.7.1")

    yield of
    forget()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", "x_ptr + n", "x_ptr - n"),
        ("kernel.py", "@triton.jit", "@triton.jit(noinline=True)"),
        ("helpers.py", "* 2.0", "* 3.0"),  # a function that it calls
        ("helpers.py", "x + SMALL", "x - SMALL"),  # a function that this one calls
        ("helpers.py", "1e-5", "1e-6"),  # a constant that this one reads
        ("helpers.py", "UNUSED: tl.constexpr = 4", "UNUSED: tl.constexpr = 8"),  # a default
        ("constants.py", "constexpr(32)", "constexpr(16)"),  # read through its module
        ("constants.py", "(0, 2, 1)", "(0, 1, 2)"),
        ("constants.py", "(0, 2, 1)", "(0, '2', 1)"),
        ("constants.py", "$1, 1;", "$1, 2;"),  # in another constant's value
    ],
)
def test_a_change_of_what_is_compiled_changes_it(
    of_files: Digest, file: str, old: str, new: str
) -> None:
    assert of_files(file, old, new) != of_files()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", "    tl.store", "    # The sum.\n\n    tl.store"),
        ("kernel.py", "_ASM: tl", "LATER = 3\n_ASM: tl"),  # moves every line below
        ("helpers.py", "Says nothing.", "Says more."),
        ("helpers.py", "    return x\n", "    return x + 1\n"),  # no kernel calls it
    ],
)
def test_a_change_that_the_compiler_does_not_see_leaves_it(
    of_files: Digest, file: str, old: str, new: str
) -> None:
    assert of_files(file, old, new) == of_files()


def test_a_function_that_moves_to_another_file_leaves_it(of_files: Digest) -> None:
    moved = FILES["helpers.py"] + FILES["constants.py"]
    assert of_files("helpers.py", FILES["helpers.py"], moved) == of_files()
    helpers = "from digested.helpers import near\n"
    assert of_files("kernel.py", helpers, FILES["helpers.py"]) == of_files()


@pytest.mark.parametrize(
    "change",
    [
        {"types": {"x_ptr": "*fp32", "n": "i64"}},
        {"constexprs": {"BLOCK": 128}},
        {"constexprs": {"BLOCK": 64.0}},
        {"constexprs": {"BLOCK": "64"}},
        {"multiples_of_16": frozenset()},
        {"num_warps": 8},
        {"num_stages": 3},
        {"aligned": False},
        {"max_registers": 64},
        {"fuses": False},
    ],
    ids=str,
)
def test_each_part_of_a_specialization_changes_it(of_files: Digest, change: dict[str, Any]) -> None:
    before = of_files()
    assert digest(SIGNATURE, 86, "3.7.1") == before
    assert digest(replace(SIGNATURE, **change), 86, "3.7.1") != before


def test_the_architecture_triton_and_the_reader_change_it(
    of_files: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_files()
    assert digest(SIGNATURE, 89, "3.7.1") != before
    assert digest(SIGNATURE, 86, "3.7.2") != before
    assert digest(replace(SIGNATURE, name="other", loop_elements=8), 86, "3.7.1") == before
    assert digest(SIGNATURE, 86, "3.7.1", ORDERS.readers) != before
    monkeypatch.setattr(digests, "reader_digest", lambda reader: f"another {reader}")
    assert digest(SIGNATURE, 86, "3.7.1") != before


def test_what_a_digest_cannot_hold_is_refused(of_files: Digest) -> None:
    with pytest.raises(TypeError, match="WIDTH"):
        of_files("constants.py", "tl.constexpr(32)", "type('Width', (), {})")
    with pytest.raises(TypeError, match="cannot hold"):
        of_files("constants.py", "tl.constexpr(32)", "object()")
    with pytest.raises(TypeError, match="cannot hold"):
        digest(replace(SIGNATURE, constexprs={"BLOCK": object()}), 86, "3.7.1")


def test_no_two_rows_are_compiled_from_the_same() -> None:
    every = every_signature()
    found = {digest(signature, key[1], "3.7.1") for key, signature in every.items()}
    assert len(found) == len(every)


def test_it_holds_every_function_that_triton_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton's own walk of the same functions decides what triton compiles again."""
    called: set[str] = set()
    monkeypatch.setattr(
        jit.DependenciesFinder,
        "_update_hash",
        lambda self, function: called.add(f"{function.fn.__module__}.{function.fn.__qualname__}"),
    )
    kernels = {(signature.module, signature.function) for signature in every_signature().values()}
    functions: dict[str, Any] = {}
    for module, name in kernels:
        kernel = getattr(importlib.import_module(module), name)
        found = {*sources(kernel)}
        called.clear()
        for each in found:
            home, _, function_name = each.rpartition(".")
            function = getattr(importlib.import_module(home), function_name)
            functions[each] = function
            finder = jit.DependenciesFinder(
                name=function_name, globals=function.__globals__, nonlocals={}, src=function.src
            )
            finder.visit(function.parse())
        missing = {each for each in called if not each.startswith("triton.")} - found
        assert not missing, (name, missing)
    assert len(functions) > len(kernels)
