from __future__ import annotations

import os
import subprocess
import sys

from appliance.runtime import ALLOCATOR

# Frees memory below some that is in use, where a heap that has been trimmed finds room again.
AFTER_A_LOAD = """
import numpy as np
from appliance.engine.run.host_device import NativeDevice
from appliance.runtime import release_unused, resident_bytes

read, kept = np.ones(64 << 20, np.uint8), np.ones(1 << 20, np.uint8)
del read
release_unused()
before = resident_bytes()
zeros = NativeDevice().zeros((16, 1 << 19), "int32")
unwritten = resident_bytes() - before
zeros[3] = 1
print(unwritten, resident_bytes() - before, zeros.sum())
"""


def test_zeros_take_memory_once_they_are_written() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", AFTER_A_LOAD],
        env={**os.environ, **ALLOCATOR},
        capture_output=True,
        text=True,
        check=True,
    )
    unwritten, written, total = map(int, ran.stdout.split())
    assert unwritten < 1 << 20, "of 32 MiB"
    assert 1 << 21 <= written < 5 << 20, "a row of 2 MiB, in huge pages"
    assert total == 1 << 19
