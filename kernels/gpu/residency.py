"""Counts the programs of a compiled kernel that a multiprocessor executes at a time.

It uses only facts of the card and of the compiled kernel. Imports no triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

WARP = 32
REGISTERS = 65536  # of a multiprocessor, on every architecture from 8.0 on
REGISTER_UNIT = 256  # a warp's registers come in multiples of this
WARP_UNIT = 4  # parts of a multiprocessor, each with a share of its registers
RESERVED_SHARED = 1024  # bytes of shared memory that the driver reserves for each program
MOST_PROGRAMS = 16  # of a multiprocessor, on the architecture with fewest


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of one program of a compiled kernel.

    Attributes:
        registers: per thread; 0 if unknown.
        shared_bytes: of shared memory.
        num_warps: of 32 threads.
    """

    registers: int
    shared_bytes: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """Resources that the programs on a GPU share.

    Attributes:
        num_sms: multiprocessors.
        shared_bytes: of a multiprocessor.
        threads: most threads of a multiprocessor.
        l2_bytes: of the second-level cache that all share.
    """

    num_sms: int
    shared_bytes: int
    threads: int
    l2_bytes: int

    def resident(self, program: Footprint) -> int:
        """Return the programs of a kernel that a multiprocessor executes at a time, at least 1."""
        warps = self.threads // WARP
        if program.registers:
            each = -(-program.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
            warps = min(warps, REGISTERS // each // WARP_UNIT * WARP_UNIT)
        by_shared = self.shared_bytes // (program.shared_bytes + RESERVED_SHARED)
        return max(1, min(warps // program.num_warps, by_shared, MOST_PROGRAMS))


# The largest card of each compute capability, from NVIDIA's tables, to compile without a card.
LARGEST = {
    80: Multiprocessors(108, 164 << 10, 2048, 40 << 20),
    86: Multiprocessors(84, 100 << 10, 1536, 6 << 20),
    89: Multiprocessors(128, 100 << 10, 1536, 72 << 20),
    90: Multiprocessors(132, 228 << 10, 2048, 50 << 20),
    120: Multiprocessors(170, 100 << 10, 1536, 96 << 20),
}


@lru_cache
def multiprocessors_of(device: torch.device, capability: int) -> Multiprocessors:
    """Return a device's resources; without a GPU, those of the largest card of a capability."""
    if device.type != "cuda":
        return LARGEST[max(known for known in LARGEST if known <= capability)]
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        found.max_threads_per_multi_processor,
        found.L2_cache_size,
    )


@dataclass(frozen=True, slots=True)
class Footprints:
    """The footprints of one kernel's variants, each read once, after compilation.

    Attributes:
        kernel: of Triton.
        found: by the key of a variant.
    """

    kernel: Any
    found: dict[Hashable, Footprint] = field(default_factory=dict)

    def of(
        self, device: torch.device, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Footprint | None:
        """Return the footprint of a launch; compile and load it if needed, but do not launch it.

        Args:
            device: of the launch.
            arguments: its tensors and numbers.
            options: its compile-time arguments and compiler options.

        Returns:
            None while kernels are only recorded, to be compiled later.
        """
        kinds = (getattr(argument, "dtype", type(argument)) for argument in arguments)
        variant = (device, *kinds, *options.values())
        if variant not in self.found:
            compiled = self.kernel.warmup(*arguments, grid=(1,), **options)
            if compiled is None:
                return None
            compiled._init_handles()
            self.found[variant] = Footprint(
                compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps
            )
        return self.found[variant]
