"""A Triton driver whose kernels run on the CPU, from the PTX that they are compiled to."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend

from ptx_machine.machine import Machine
from ptx_machine.memory import GlobalMemory
from ptx_machine.steps import compiled
from ptx_machine.syntax import parse

_NEW_DEVICES = itertools.count(1000)
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KiB that one program can have
# What the kernels' tests execute: with HMMA; with wgmma; with FP8 products.
TARGETS = {"sm_86": 86, "sm_90": 90, "sm_120": 120}
AT_ONCE = 4096  # threads, as many programs as have them together


@contextmanager
def gpu(capability: int, *, has_compiled: bool = True) -> Iterator[PtxDriver]:
    """While this is open, kernels are compiled for a GPU and run as their PTX says, on the CPU.

    Args:
        capability: compute capability (86 is 8.6).
        has_compiled: whether to keep what this process has compiled for it before.
    """
    nvidia, before = backends["nvidia"], triton.runtime.driver._active
    driver = PtxDriver(capability, device=capability if has_compiled else next(_NEW_DEVICES))
    backends["nvidia"] = replace(nvidia, compiler=PtxBackend)
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        backends["nvidia"] = nvidia
        triton.runtime.driver.set_active(before)


class PtxBackend(CUDABackend):  # type: ignore[misc]
    """Compiles as for a GPU, but stops at PTX."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        super().add_stages(stages, options, language)
        del stages["cubin"]

    def hash(self) -> str:
        return f"{super().hash()}-ptx"


class PtxDriver(DriverBase):  # type: ignore[misc]
    """Stands for one GPU of a compute capability (86 is 8.6).

    What Triton's base class wants beside what is here, only timing kernels would ask for.

    Attributes:
        traffic: counts of instructions and accesses since it was set; None counts none.
        executes: False to compile what is launched and leave its results undefined.
    """

    def __init__(self, capability: int, device: int, seed: int = 0) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.capability = capability
        self.device = device  # by its number Triton keeps what it compiled
        self.traffic: Counter[str] | None = None
        self.executes = True
        self.random = random.Random(seed)
        self.utils = self
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self.capability] * 1024}

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[Any, ...]:
        program = parse(ptx.decode())
        return program, (program, compiled(program), shared), 0, 0, 1024


class _Launcher:
    """Of a kernel, which outlives the driver that it was compiled for."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._is_constant = [kind == "constexpr" for kind in source.signature.values()]
        self._kinds = list(source.signature.values())
        self._is_early = metadata.launch_pdl
        assert metadata.global_scratch_size == 0

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *more: Any) -> None:
        driver = triton.runtime.driver.active
        assert isinstance(driver, PtxDriver)
        if not driver.executes:
            return
        program, steps, shared = function
        assert program.waits == self._is_early, "what is launched early waits, and nothing else"
        values = [
            value
            for value, is_constant in zip(more[4:], self._is_constant, strict=True)
            if not is_constant
        ]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        kinds = [kind for kind in self._kinds if kind != "constexpr"]
        numbers = [_bits(value, kind) for value, kind in zip(values, kinds, strict=True)]
        arguments = dict(zip(program.params, [*numbers, 0, 0], strict=True))
        memory = GlobalMemory(tensors, driver.traffic)
        blocks = list(itertools.product(range(x), range(y), range(z)))
        driver.random.shuffle(blocks)
        at_once = max(1, AT_ONCE // program.threads)
        for begin in range(0, len(blocks), at_once):
            part = blocks[begin : begin + at_once]
            machine = Machine(program, arguments, memory, part, (x, y, z), shared, driver.traffic)
            machine.run(steps)


def _bits(value: Any, kind: str) -> int:
    """An argument as the kernel gets it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind in {"fp32", "f32"}:
        return int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF
    return int(value)
