"""Tables of compiled kernels: which rows are stale, sampled, or far dearer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.kernels.compiled_kernels import __main__ as tool
from support.kernels.compiled_kernels.compile import Resources, compile_kernel
from support.kernels.compiled_kernels.digest import digest
from support.kernels.compiled_kernels.signature import KernelSignature
from support.kernels.compiled_kernels.table import (
    Kind,
    dearer,
    every_signature,
    load,
    save,
    stale,
)
from support.runs.turns import sample, seed_of_tree

TRITON = "3.6.0"
KEYS = list(every_signature())
ROW = {"registers": 100, "shared": 0, "instructions": 1000, "wide_loads": 8, "loop": {"HMMA": 100}}

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, n, ADDS: tl.constexpr):
    i = tl.program_id(0)
    if ADDS:
        n += 1
    tl.store(x_ptr + i, n)
"""
SIGNATURE = KernelSignature(
    name="row",
    module="tabled",
    function="kernel",
    types={"x_ptr": "*i32", "n": "i32"},
    constexprs={"ADDS": False},
    multiples_of_16=frozenset(),
    num_warps=1,
    num_stages=1,
)
Update = Callable[..., tuple[dict[str, object], int]]


@pytest.fixture
def update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Update]:
    """Update a table of KERNEL as a text now has it; return its row and the number of compiles."""
    compiled: list[int] = []

    def compiling(signature: KernelSignature, capability: int) -> Resources:
        compiled.append(capability)
        return compile_kernel(signature, capability)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tool, "COMPILERS", {"resources": compiling})

    def of(
        text: str, signature: KernelSignature = SIGNATURE, readers: tuple[str, ...] = ("compile",)
    ) -> tuple[dict[str, object], int]:
        key = (signature.name, 86)
        kind = Kind("resources", lambda: {key: signature}, readers)
        monkeypatch.setattr(tool, "kind_of", lambda path: kind)
        (tmp_path / "tabled.py").write_text(text)
        sys.modules.pop("tabled", None)
        importlib.invalidate_caches()
        compiled.clear()
        assert tool.update(tmp_path / "table.json", accept=True) == 0
        table = load(tmp_path / "table.json")
        assert stale(table, version("triton"), kind) == []
        return table[key], len(compiled)

    yield of
    sys.modules.pop("tabled", None)


@pytest.mark.parametrize(
    ("old", "new", "is_read_anew"),
    [
        ("tl.program_id(0)", "tl.program_id(0)  # its place", False),
        ("n += 1", "n += 2", True),  # of a branch that it does not take
        ("i = tl.program_id(0)", "i = 0 + tl.program_id(0)", True),
    ],
)
def test_a_row_is_not_compiled_whose_kernel_is_lowered_to_the_same(
    update: Update, old: str, new: str, is_read_anew: bool
) -> None:
    before, count = update(KERNEL)
    assert count == 1
    assert before["stack"] == 0
    row, count = update(KERNEL.replace(old, new))
    assert count == 0
    assert (row["digest"] != before["digest"]) == is_read_anew
    assert {**row, "digest": ""} == {**before, "digest": ""}


@pytest.mark.parametrize(
    ("old", "new"),
    [("x_ptr + i, n", "x_ptr + i, n * n"), ("tl.program_id(0)", "tl.program_id(1)")],
)
def test_a_row_is_compiled_whose_kernel_is_lowered_to_something_else(
    update: Update, old: str, new: str
) -> None:
    before, _ = update(KERNEL)
    row, count = update(KERNEL.replace(old, new))
    assert count == 1
    assert row["ir"] != before["ir"]


def test_an_argument_that_is_known_when_compiled_and_changes_nothing_is_free(
    update: Update,
) -> None:
    before, _ = update(KERNEL)
    text = KERNEL.replace("ADDS: tl", "more_ptr, ADDS: tl")
    more = replace(SIGNATURE, constexprs={"ADDS": False, "more_ptr": None})
    row, count = update(text, more)
    assert count == 0
    assert row["digest"] != before["digest"]


@pytest.mark.parametrize(
    "change",
    [
        {"signature": replace(SIGNATURE, num_stages=2)},
        {"signature": replace(SIGNATURE, max_registers=32)},
        {"readers": ("compile", "listing")},
    ],
    ids=["stages", "registers", "readers"],
)
def test_a_row_is_compiled_anew_for_other_options_and_readers(
    update: Update, change: dict[str, Any]
) -> None:
    update(KERNEL)
    _, count = update(KERNEL, **change)
    assert count == 1


def test_rows_that_are_missing_or_of_other_sources_are_stale() -> None:
    table = {
        key: {"digest": digest(signature, key[1], TRITON)}
        for key, signature in every_signature().items()
    }
    assert stale(table, TRITON) == []
    assert stale(table, "3.7.1") == KEYS
    table[KEYS[1]] = {"digest": table[KEYS[0]]["digest"]}
    del table[KEYS[3]]
    assert stale(table, TRITON) == [KEYS[1], KEYS[3]]


def test_a_table_is_read_as_it_was_written_one_line_a_row(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = {("kernel", 80): ROW, ("kernel", 120): {**ROW, "registers": 1}, ("other", 80): ROW}
    save(path, table, TRITON)
    assert load(path) == table
    assert sum("registers" in line for line in path.read_text().splitlines()) == len(table)
    assert load(tmp_path / "missing.json") == {}


def test_samples_of_different_seeds_reach_every_row() -> None:
    seen = set()
    for seed in range(200):
        chosen = sample(KEYS, 12, str(seed))
        assert 0 < len(chosen) < len(KEYS) / 6
        assert chosen == sample(KEYS, 12, str(seed))
        seen.update(chosen)
    assert seen == set(KEYS)
    assert sample(KEYS, 1, "") == KEYS
    assert len(sample(KEYS[:2], 1000, "")) == 1


@pytest.mark.parametrize(
    ("change", "ways"),
    [
        ({}, []),
        ({"registers": 110, "instructions": 900, "loop": {"HMMA": 104}}, []),
        ({"registers": 111}, ["registers 100 -> 111"]),
        ({"registers": 89}, ["registers 100 -> 89"]),
        ({"shared": 1}, ["shared 0 -> 1"]),
        ({"wide_loads": 0}, ["wide_loads 8 -> 0"]),
        ({"loop": {"HMMA": 50}}, []),
        ({"loop": {"HMMA": 106}}, ["instructions of the hot loop 100 -> 106"]),
    ],
)
def test_a_row_is_dearer_past_a_tenth_or_in_its_loop_a_twentieth(
    change: dict[str, object], ways: list[str]
) -> None:
    assert list(dearer({**ROW, **change}, ROW)) == ways


def test_a_tree_has_one_seed() -> None:
    seed = seed_of_tree()
    assert seed == seed_of_tree()
    assert set(seed) <= set("0123456789abcdef")
