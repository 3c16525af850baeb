"""Measures the memory bandwidth of a rank's threads on a CPU. Imports no torch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from appliance.kernels.cpu.arena import Mapping

COPY_BYTES = 64 << 20  # of all threads; more than most caches
PASSES = 3


def copy_bandwidth(threads: int) -> float:
    """Return bytes read and written per second in the fastest pass.

    Takes twice `COPY_BYTES` of memory meanwhile.
    """
    each = -(-COPY_BYTES // threads)
    source, target = (np.frombuffer(Mapping.of(each * threads).memory, np.uint8) for _ in range(2))
    source[:] = 1
    parts = [slice(each * place, each * (place + 1)) for place in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + PASSES):  # the first one touches the target's memory
            begin = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            best = min(best, time.perf_counter() - begin)
    return 2 * each * threads / best
