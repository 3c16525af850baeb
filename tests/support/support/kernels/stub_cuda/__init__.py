"""Triton's own CUDA driver over a libcuda without a device, in place of a GPU.

Kernels are compiled to machine code, packed and launched as on a GPU; nothing executes them. What
is left is the host's part of a launch, without the CUDA driver's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from appliance.kernels.gpu.target import target_of

MOST_ARGUMENTS = 32


class Launch(ctypes.Structure):
    """The last launch, and how many there were.

    `sizes` are bytes of the arguments that the next launches keep in `arguments`.
    """

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32),
        ("sizes", ctypes.c_uint8 * MOST_ARGUMENTS),
        ("arguments", ctypes.c_uint64 * MOST_ARGUMENTS),
    )


@contextmanager
def stub_gpu(capability: int, device: int = 0) -> Iterator[Launch]:
    """While this is open, kernels for tensors of the CPU are launched by the stub.

    Args:
        capability: compute capability (86 is 8.6).
        device: the number of the current one, which `current` of the driver may change.
    """
    driver, before = _driver(capability), triton.runtime.driver._active
    driver.current = device
    target_of.cache_clear()
    triton.runtime.driver.set_active(driver)
    try:
        yield Launch.in_dll(_library(), "last_launch")
    finally:
        triton.runtime.driver.set_active(before)
        target_of.cache_clear()


@cache
def _library() -> ctypes.CDLL:
    """Compile and load the stub; Triton's driver then finds it by its name."""
    folder = Path(tempfile.mkdtemp(prefix="stub-cuda-"))
    made = folder / "libcuda.so.1"
    include = Path(nvidia.__file__).parent / "include"
    source = Path(__file__).with_name("stub.c")
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1",
         str(source), "-o", str(made)],
        check=True,
    )  # fmt: skip
    (folder / "libcuda.so").symlink_to(made.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


@cache
def _driver(capability: int) -> Any:
    _library()
    from triton.backends.nvidia.driver import CudaDriver

    class StubDriver(CudaDriver):  # type: ignore[misc]
        """CUDA's driver for one compute capability; torch has no CUDA, so it is not asked."""

        def __init__(self) -> None:
            super().__init__()
            self.current = 0
            self.get_current_device = lambda: self.current
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    return StubDriver()
