"""Compile kernels and write a table of what they became, or compare that with the table.

Of the rows whose sources changed, only those are compiled whose kernels are lowered to something
else than before.

    PYTHONPATH=tests/support .venv/bin/python -m support.kernels.compiled_kernels TABLE.json

The table's name says of which kind it is, resources or orders (table.py).
A process that interprets kernels (TRITON_INTERPRET=1) cannot compile them, so this runs in one of
its own; `scripts/check_triton` starts it for each table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import triton
from support.kernels.compiled_kernels.assemble import assemble_kernel
from support.kernels.compiled_kernels.compile import compile_kernel
from support.kernels.compiled_kernels.digest import digest
from support.kernels.compiled_kernels.lower import ir_digest
from support.kernels.compiled_kernels.signature import KernelSignature
from support.kernels.compiled_kernels.table import (
    ORDERS,
    RESOURCES,
    Key,
    Kind,
    Table,
    dearer,
    load,
    save,
    stale,
)
from support.runs.turns import sample, seed_of_tree

COMPILERS = {RESOURCES.name: compile_kernel, ORDERS.name: assemble_kernel}
FEW = 40  # kernels that compile before other processes would have imported torch and triton


def kind_of(path: Path) -> Kind:
    return next(kind for kind in (RESOURCES, ORDERS) if path.name.startswith(kind.name))


def compile_rows(kind: Kind, keys: list[Key]) -> Table:
    """Compile the signatures of these rows; many of them use all cores."""
    every = kind.signatures()
    wanted = [every[key] for key in keys]
    capabilities = [capability for _, capability in keys]
    compiling: Callable[[KernelSignature, int], object] = COMPILERS[kind.name]
    if len(keys) < FEW:
        results = list(map(compiling, wanted, capabilities))
    else:
        # Starts fresh interpreters: a fork may hang once triton's threads have started.
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
            results = list(workers.map(compiling, wanted, capabilities, chunksize=4))
    return {
        key: {
            **digests(every[key], key[1], kind),
            **json.loads(json.dumps(found, default=asdict)),  # lists for tuples, as JSON gives them
        }
        for key, found in zip(keys, results, strict=True)
    }


def digests(signature: KernelSignature, capability: int, kind: Kind) -> dict[str, str]:
    return {
        "digest": digest(signature, capability, triton.__version__, kind.readers),
        "ir": ir_digest(signature, capability, kind.readers),
    }


def renewed(table: Table, keys: list[Key], kind: Kind) -> Table:
    """Return those of these rows whose kernels are lowered to what they were, with new digests."""
    every = kind.signatures()
    found = {key: digests(every[key], key[1], kind) for key in keys if key in table}
    return {
        key: {**table[key], **now}
        for key, now in found.items()
        if table[key].get("ir") == now["ir"]
    }


def update(path: Path, *, accept: bool) -> int:
    """Renew or compile stale rows; without `accept`, keep rows that got far dearer."""
    table, kind = load(path), kind_of(path)
    old = stale(table, triton.__version__, kind)
    same = renewed(table, old, kind)
    table |= same
    wanted = [key for key in old if key not in same]
    compiled = compile_rows(kind, wanted)
    refused = {
        key: ways
        for key, row in compiled.items()
        if kind.name == RESOURCES.name
        and not accept
        and key in table
        and (ways := list(dearer(row, table[key])))
    }
    now = {**table, **{key: row for key, row in compiled.items() if key not in refused}}
    every = kind.signatures()
    save(path, {key: now[key] for key in every if key in now}, triton.__version__)
    print(f"{path.name}: {len(wanted)} of {len(every)} rows compiled, {len(same)} only renewed")
    for (name, capability), ways in refused.items():
        print(f"  {name}, {capability}: {', '.join(ways)}")
    if refused:
        print(f"{len(refused)} rows are left as they were; --accept writes them too")
    return bool(refused)


def check(path: Path, one_in: int) -> int:
    """Compile a sample of the rows that are not stale, and compare; write nothing."""
    table, kind = load(path), kind_of(path)
    old = set(stale(table, triton.__version__, kind))
    keys = sample([key for key in kind.signatures() if key not in old], one_in, seed_of_tree())
    differing = [key for key, row in compile_rows(kind, keys).items() if row != table[key]]
    print(f"{path.name}: {len(keys)} rows compiled, {len(old)} stale, {len(differing)} differ")
    for name, capability in differing:
        print(f"  {name}, {capability}")
    return bool(differing or old)


def main() -> None:
    parser = argparse.ArgumentParser(prog="compiled_kernels", description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--accept", action="store_true", help="write rows that became far dearer")
    parser.add_argument(
        "--check", type=int, metavar="N", help="compile one row in N and compare; write nothing"
    )
    options = parser.parse_args()
    for name in list(os.environ):  # settings that would change the code and are in no digest
        if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR":
            del os.environ[name]
    if options.check:
        sys.exit(check(options.table, options.check))
    sys.exit(update(options.table, accept=options.accept))


if __name__ == "__main__":
    main()
