"""Looks for the driver of NVIDIA GPUs without loading torch."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache


@lru_cache
def has_driver() -> bool:
    """Return True if the library exists without which torch sees no GPU either."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
