"""Tables of compiled kernels: a row for each signature and compute capability.

One holds the resources of every kernel, one the order of machine code where that matters, by every
assembler. A row holds the digest of everything that it depends on. While that is unchanged,
compiling again would give the same row. It also holds that of what its kernel is lowered to: while
this is unchanged, only the first is written anew. All other rows are compiled, and a sample to
check this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from support.kernels.compiled_kernels import planted
from support.kernels.compiled_kernels.digest import digest, sources
from support.kernels.compiled_kernels.signature import (
    CAPABILITIES,
    MOST_COMPILED,
    KernelSignature,
)
from support.kernels.compiled_kernels.signatures import packed_matmul, signatures

from appliance.kernels.gpu.target import LEAST_DEPENDENT

Key = tuple[str, int]  # a signature's name, a compute capability
Row = dict[str, Any]  # DIGESTS, and the fields of compile.Resources
Table = dict[Key, Row]

DIGESTS = "digest", "ir"  # of what a row depends on, and of what its kernel is lowered to
WARPGROUPS = 90  # the compute capability whose products are asynchronous and read registers
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


@cache
def every_ordered() -> dict[Key, KernelSignature]:
    """Return the kernels whose order of machine code is judged, as they are launched.

    These are all that may multiply by warpgroups, and all that start early.
    """
    found: dict[Key, KernelSignature] = {}
    for capability in CAPABILITIES:
        if capability < LEAST_DEPENDENT:
            continue
        # What has no tiles of its own for an architecture is compiled in all its forms.
        of_most = (
            each
            for each in signatures(MOST_COMPILED)
            if "EARLY" in each.constexprs and each.function != "packed_matmul_kernel"
        )
        here = (*signatures(capability), *packed_matmul.early_signatures(capability))
        for signature in (*here, *of_most, *planted.order_signatures(capability)):
            launched = as_launched(signature)
            if is_early(launched) or (capability == WARPGROUPS and multiplies(launched)):
                found[launched.name, capability] = launched
    return found


def as_launched(signature: KernelSignature) -> KernelSignature:
    """Return a signature as GPUs launch it on which kernels start early."""
    if is_early(signature) or "EARLY" not in signature.constexprs:
        return signature
    name, rows, count = signature.name.partition(" rows ")
    return replace(
        signature,
        name=f"{name} early{rows}{count}",
        constexprs={**signature.constexprs, "EARLY": True},
    )


def is_early(signature: KernelSignature) -> bool:
    return bool(signature.constexprs.get("EARLY"))


def multiplies(signature: KernelSignature) -> bool:
    """Return True if a kernel, or a function that it calls, has a product for tensor cores."""
    kernel = getattr(import_module(signature.module), signature.function)
    return any("dot(" in text for text, _ in sources(kernel).values())


@dataclass(frozen=True, slots=True)
class Kind:
    """What a table holds.

    Attributes:
        name: of its files, NAME_triton_VERSION.json.
        signatures: of its rows.
        readers: modules beside this one that make a row of machine code.
    """

    name: str
    signatures: Callable[[], dict[Key, KernelSignature]]
    readers: tuple[str, ...]


RESOURCES = Kind("resources", every_signature, ("compile",))
ORDERS = Kind("orders", every_ordered, ("compile", "listing", "order", "assemble"))


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


def stale(table: Table, triton: str, kind: Kind = RESOURCES) -> list[Key]:
    """Return the keys whose row is missing or was compiled from something else."""
    return [
        key
        for key, signature in kind.signatures().items()
        if table.get(key, {}).get("digest") != digest(signature, key[1], triton, kind.readers)
    ]


def dearer(found: Row, before: Row) -> Iterator[str]:
    """Yield how a row differs too much from before; of its hot loop, only increases count."""
    for what in ("registers", "shared", "instructions", "wide_loads"):
        if abs(found[what] - before[what]) > MOST_MORE * before[what]:
            yield f"{what} {before[what]} -> {found[what]}"
    loop, loop_before = sum(found["loop"].values()), sum(before["loop"].values())
    if loop > (1 + MOST_MORE_IN_LOOP) * loop_before:
        yield f"instructions of the hot loop {loop_before} -> {loop}"
