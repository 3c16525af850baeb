"""What the C libraries under torch read from the environment as they are loaded.

A leaf; sets nothing by itself.
"""

from __future__ import annotations

import os

# OpenMP threads that spin at a barrier starve each other as soon as another process needs a core:
# 150 small matmuls on 2 cores took 83 ms (median) beside a busy process and 3.5 alone. With this
# limit they took 7 to 16 and 3.4; without any spinning 13 and 10.
OPENMP = {"GOMP_SPINCOUNT": "1000"}

# Activations of a step are freed and allocated again in the next. Giving them back to the system in
# between costs page faults in every layer: up to four times the time of attention.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def limit_spinning() -> None:
    """Set `OPENMP` for this process; it has an effect before torch is imported only."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)
