"""Measures this machine's memory bandwidth, and with PyTorch its arithmetic, as JSON.

The second runs in its own process, so a load generator need not load PyTorch. Takes the best of
several passes, because other programs only slow a pass down.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from appliance.runtime import child_environment

SIZE = 512 * 2**20  # bytes; exceeds any cache
SIDE = 1024  # of the matrices
PASSES = 8
HOW = (
    f"best of {PASSES} passes; read: sum of {SIZE >> 20} MiB by NumPy, a part in each thread; copy:"
    f" as much float32 copied by PyTorch, counted twice; arithmetic: product of two {SIDE} x {SIDE}"
    " float32 matrices by PyTorch"
)


def read_rate(threads: int) -> float:
    """Measure how much memory threads read together, in GB/s."""
    parts = np.array_split(np.ones(SIZE // 8, np.uint64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return round(SIZE / _best(lambda: list(pool.map(np.sum, parts))) / 1e9, 1)


def measure(threads: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(SIZE // 4)
    target = torch.empty_like(source)
    matrix = source[: SIDE * SIDE].view(SIDE, SIDE)
    return {
        "threads": threads,
        "read_gb_per_second": read_rate(threads),
        "copy_gb_per_second": round(2 * SIZE / _best(lambda: target.copy_(source)) / 1e9, 1),
        "fp32_gflop_per_second": round(2 * SIDE**3 / _best(lambda: matrix @ matrix) / 1e9),
    }


def probe(threads: list[int]) -> list[dict[str, Any]]:
    """Measure in a separate process."""
    command = [sys.executable, "-P", __file__, *map(str, threads)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=child_environment()
    )
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([measure(int(threads)) for threads in sys.argv[1:]]))
