"""The memory for a model: this machine's, or that of a GPU in the table."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.devices import choose_device
from appliance.engine.memory.known_gpus import GIB, counted, gpu_named
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.config import EngineConfig

# Assumed bytes of a CUDA context with its libraries.
_CONTEXT_BYTES = GIB // 2
MOST_GPUS = 8
IDLE_LOAD = 0.5  # processes that run, over a minute
_STATED = "its maker's figure"


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Memory with its bandwidth.

    Attributes:
        bandwidth: GB/s; None if not measured.
        gpu_bytes: of a GPU that need not be here; None for this machine.
        how: source of the bandwidth.
        is_gpu: a GPU's.
        is_busy: other programs ran while the bandwidth was measured.
        count: GPUs that divide the model, as if their memory and bandwidth were one's.
    """

    name: str
    bandwidth: float | None
    gpu_bytes: int | None = None
    how: str = ""
    is_gpu: bool = False
    is_busy: bool = False
    count: int = 1


def place_of(gpu: str | None, config: EngineConfig, *, measures: bool = True) -> ModelPlace:
    """Return the memory for a model.

    Args:
        gpu: a name in the table, or "2x" and one; None for the device of `config` on this machine.
        measures: measure this machine's memory bandwidth, about three seconds.

    Raises:
        ConfigError: the GPU is not in the table, or torch cannot use the one here.
    """
    if gpu is not None:
        count, name = counted(gpu)
        if not 1 <= count <= MOST_GPUS:
            raise ConfigError(f"--gpu {gpu!r}: a model is divided over up to {MOST_GPUS} cards")
        known = gpu_named(name)
        free = count * (int(known.gib * GIB) - _CONTEXT_BYTES)
        named = f"{known.name}, {known.gib:g} GiB"
        if count > 1:
            named = f"{count} x {named} each"
        speed = count * known.bandwidth
        return ModelPlace(named, speed, free, _STATED, is_gpu=True, count=count)
    import psutil

    if choose_device(config).type == "cuda":
        import torch

        name = torch.cuda.get_device_name(0)
        bandwidth: float | None = None
        with contextlib.suppress(ConfigError):  # it is not in the table
            bandwidth = gpu_named(name.removesuffix(" Laptop GPU")).bandwidth
        return ModelPlace(name, bandwidth, None, _STATED, is_gpu=True)
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    if not measures:
        return ModelPlace("this machine's memory", None)
    from appliance.bench.bandwidth import HOW, read_rate

    busy = os.getloadavg()[0] > IDLE_LOAD
    how = f"measured just now, {HOW}"
    return ModelPlace("this machine's memory", read_rate(threads), None, how, is_busy=busy)
