"""The product's kernels on the PTX machine, in place of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ptx_machine import driver

from appliance.kernels.gpu.target import target_of


@contextmanager
def gpu(capability: int, *, has_compiled: bool = True) -> Iterator[driver.PtxDriver]:
    """While this is open, kernels are launched for that compute capability (86 is 8.6).

    Args:
        capability: of the GPU that the machine stands for.
        has_compiled: whether to keep what this process has compiled for it before.
    """
    target_of.cache_clear()  # the kernels ask once what a device is
    try:
        with driver.gpu(capability, has_compiled=has_compiled) as machine:
            yield machine
    finally:
        target_of.cache_clear()
