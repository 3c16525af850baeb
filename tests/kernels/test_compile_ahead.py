"""Steps of compiling that threads must not run at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from appliance.kernels.gpu.compile_ahead import one_at_a_time


def test_threads_parse_one_at_a_time() -> None:
    """Python 3.11's parser fails if two do."""
    inside, most = 0, 0

    def parse(source: str) -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(1e-4)  # another thread would run here
        inside -= 1
        return source.upper()

    locked = one_at_a_time(parse)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(locked, "kernels" * 20)) == list("KERNELS" * 20)
    assert most == 1
