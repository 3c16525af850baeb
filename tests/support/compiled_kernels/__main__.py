"""Compile all kernels and write what resources they take.

    PYTHONPATH=tests/support .venv/bin/python -m compiled_kernels TABLE.json [--planted]

A process that interprets kernels (TRITON_INTERPRET=1) cannot compile them, so this runs in one of
its own.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import triton

from compiled_kernels import planted
from compiled_kernels.compile import Resources, compile_kernel
from compiled_kernels.signature import CAPABILITIES, KernelSignature
from compiled_kernels.signatures import signatures

Table = dict[str, dict[int, Resources]]  # name -> capability -> resources


def compile_all(wanted: list[tuple[KernelSignature, int]]) -> Table:
    """Compile each signature for its compute capability, on all cores."""
    resources: Table = {}
    # A fresh interpreter each: what is forked after triton's threads have started may hang.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        results = workers.map(compile_kernel, *zip(*wanted, strict=True), chunksize=4)
        for (signature, capability), found in zip(wanted, results, strict=True):
            resources.setdefault(signature.name, {})[capability] = found
    return resources


def main() -> None:
    """Write the table as JSON, one line for each kernel and capability."""
    parser = argparse.ArgumentParser(prog="compiled_kernels", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--planted", action="store_true", help="and those that gates must catch")
    options = parser.parse_args()
    sources = (signatures, planted.signatures) if options.planted else (signatures,)
    table = compile_all([(s, cc) for source in sources for cc in CAPABILITIES for s in source(cc)])
    rows = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f'   "{cc}": {json.dumps(asdict(found))}' for cc, found in row.items())
        + "\n  }"
        for name, row in table.items()
    ]
    kernels = ",\n".join(rows)
    options.output.write_text(
        f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{kernels}\n }}\n}}\n'
    )


if __name__ == "__main__":
    main()
