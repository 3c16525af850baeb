"""A table of compiled kernels: a row for each signature and compute capability.

A row holds the digest of everything that it depends on. While that is unchanged, compiling again
would give the same row, so only other rows are compiled, and a sample to check this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from support.kernels.compiled_kernels import planted
from support.kernels.compiled_kernels.digest import digest
from support.kernels.compiled_kernels.signature import CAPABILITIES, KernelSignature
from support.kernels.compiled_kernels.signatures import signatures

Key = tuple[str, int]  # a signature's name, a compute capability
Row = dict[str, Any]  # "digest", and the fields of compile.Resources
Table = dict[Key, Row]

# By how much a row may exceed an older one without being accepted by hand.
MOST_MORE = 0.1
MOST_MORE_IN_LOOP = 0.05


@cache
def every_signature() -> dict[Key, KernelSignature]:
    """Return the rows of a table, in its order: all shipped kernels, and planted faults."""
    return {
        (signature.name, capability): signature
        for source in (signatures, planted.signatures)
        for capability in CAPABILITIES
        for signature in source(capability)
    }


def load(path: Path) -> Table:
    """Read a table; empty if the file is missing."""
    if not path.exists():
        return {}
    kernels = json.loads(path.read_text())["kernels"]
    return {(name, int(cc)): row for name, found in kernels.items() for cc, row in found.items()}


def save(path: Path, table: Table, triton: str) -> None:
    """Write a table as JSON, one line a row, so that changes of different rows merge."""
    kernels: dict[str, list[str]] = {}
    for (name, capability), row in table.items():
        kernels.setdefault(name, []).append(f'   "{capability}": {json.dumps(row)}')
    text = ",\n".join(
        f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }" for name, rows in kernels.items()
    )
    path.write_text(f'{{\n "triton": "{triton}",\n "kernels": {{\n{text}\n }}\n}}\n')


def stale(table: Table, triton: str) -> list[Key]:
    """Return the keys whose row is missing or was compiled from something else."""
    return [
        key
        for key, signature in every_signature().items()
        if table.get(key, {}).get("digest") != digest(signature, key[1], triton)
    ]


def dearer(found: Row, before: Row) -> Iterator[str]:
    """Yield how a row differs too much from before; of its hot loop, only increases count."""
    for what in ("registers", "shared", "instructions", "wide_loads"):
        if abs(found[what] - before[what]) > MOST_MORE * before[what]:
            yield f"{what} {before[what]} -> {found[what]}"
    loop, loop_before = sum(found["loop"].values()), sum(before["loop"].values())
    if loop > (1 + MOST_MORE_IN_LOOP) * loop_before:
        yield f"instructions of the hot loop {loop_before} -> {loop}"
