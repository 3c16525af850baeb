"""The devices of this machine: which one the settings choose, its free memory and number types.

Imports torch only where a GPU is asked about.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from appliance.engine.run.adapters.loader import wants_adapters
from appliance.errors import ConfigError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa
from appliance.kernels.gpu.obstacle import gpu_use
from appliance.runtime import free_host_bytes
from appliance.wording import counted

if TYPE_CHECKING:
    import torch

    from appliance.config import EngineConfig
    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.cpu.structs import Isa
    from appliance.kernels.operations import Backend


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Processor:
    """This machine's processors, named without torch."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types that "auto" resolves to on this device.

    Attributes:
        dtype: of activations and unpacked weights; numpy's for the CPU library, otherwise torch's.
    """

    device: torch.device | Processor
    dtype: Any
    kv_format: KVFormat  # of most layers; used in messages
    block_size: int
    kv_layers: tuple[LayerPrecision, ...]  # of each layer with a cache of its own

    def kv_in_words(self) -> str:
        """Format the cache's, such as "int8" or "20 layers int4-sealed, 10 layers k8v4"."""
        counts = Counter(layer.format.value for layer in self.kv_layers)
        if len(counts) < 2:
            return self.kv_format.value
        return ", ".join(f"{counted(num, 'layer')} {form}" for form, num in counts.most_common())


def choose_device(config: EngineConfig) -> torch.device | Processor:
    """Return the configured device.

    Raises:
        ConfigError: it is missing.
    """
    if config.device == "cpu":
        return Processor()
    use = gpu_use()
    if use.is_usable:
        import torch

        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError(use.refusal())
    return Processor()


def unused_gpu(config: EngineConfig) -> str:
    """Say why a GPU that is here computes nothing, and what mends it; empty if there is none."""
    return "" if config.device == "cpu" else gpu_use().in_words()


def note_unused_gpu(config: EngineConfig, notes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Log `unused_gpu`; return it, and a load's notes with it in front."""
    unused = unused_gpu(config)
    if not unused:
        return "", notes
    logger.warning("%s", unused)
    return unused, (unused, *notes)


def memory_budget(device: torch.device | Processor, gpu_memory_utilization: float) -> int:
    """Return the bytes that this process may still take on a device."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(cast("torch.device", device))
        return int(total * gpu_memory_utilization) - (total - free)
    return free_host_bytes()


def device_name(device: torch.device | Processor, threads: int) -> str:
    """Name a device for people."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(cast("torch.device", device))
    return f"CPU, {threads} thread{'' if threads == 1 else 's'} of {os.cpu_count()}"


def native_engine(config: EngineConfig, threads: int) -> tuple[NativeEngine, Isa]:
    """Start the CPU library's threads and select the configured instruction set.

    Raises:
        LibraryError: the library is unusable, or lacks the instruction set.
        MemoryError: the threads did not start.
    """
    library = load_library()
    isa = select_isa(library, config.cpu_isa)
    return NativeEngine(library, threads), isa


def backend_of(config: EngineConfig, device: torch.device) -> Backend:
    """Return the kernels that the settings ask for on a device of torch.

    Raises:
        ConfigError: Triton cannot launch kernels on the GPU.
    """
    from appliance.kernels.backend import REFERENCE, select_backend

    choice = "reference" if config.kernels == "reference" else "auto"
    backend = select_backend(device, choice)
    if backend.name == "triton":
        from appliance.kernels.gpu.target import open_driver

        open_driver()
    if wants_adapters(config):  # adapters add to gate and up before the activation
        gated = REFERENCE.prepare_gated
        backend = replace(backend, prepare_gated=gated, stacks_shared=False)
    return backend
