"""Time a first start of the 8B shape with an empty kernel cache, and a second one.

The time runs from the start of the interpreter to the first token. Weights are made on the GPU, so
reading them from a disk comes on top. The API process, which starts meanwhile, is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.plan import Amount, Wanted
    from bench.gpu.rows import Rows

KV = "int8"


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure two starts that share a cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        for which in ("first", "second"):
            key = {"engine": "ours", "kv": KV, "what": f"{which} start"}
            rows.note(key, partial(_start, wanted.amount, cache))


def _start(amount: Amount, cache: str) -> dict[str, Any]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    begin = time.time()
    process = subprocess.run(
        [sys.executable, "-P", "-m", "bench.gpu.start_once", amount.value, KV],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    moments = json.loads(process.stdout.splitlines()[-1])
    found = {name: round(moment - begin, 2) for name, moment in moments.items()}
    return {f"{name}_seconds": seconds for name, seconds in found.items()}
