"""The memory for a model: this machine's, or that of a GPU in the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.devices import choose_device
from appliance.engine.memory.experts.prediction import GIB, gpu_named
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.config import EngineConfig

# Assumed bytes of a CUDA context with its libraries.
_CONTEXT_BYTES = GIB // 2
_STATED = "its maker's figure"


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Memory with its bandwidth.

    Attributes:
        bandwidth: GB/s; None if not measured.
        gpu_bytes: of a GPU that need not be here; None for this machine.
        how: source of the bandwidth.
        is_gpu: a GPU's.
    """

    name: str
    bandwidth: float | None
    gpu_bytes: int | None = None
    how: str = ""
    is_gpu: bool = False


def place_of(gpu: str | None, config: EngineConfig, *, measures: bool = True) -> ModelPlace:
    """Return the memory for a model.

    Args:
        gpu: a name in the table; None for the device of `config` on this machine.
        measures: measure this machine's memory bandwidth, about three seconds.

    Raises:
        ConfigError: the GPU is not in the table, or torch cannot use the one here.
    """
    if gpu is not None:
        known = gpu_named(gpu)
        free = int(known.gib * GIB) - _CONTEXT_BYTES
        return ModelPlace(
            f"{known.name}, {known.gib:g} GiB", known.bandwidth, free, _STATED, is_gpu=True
        )
    import psutil

    if choose_device(config).type == "cuda":
        import torch

        name = torch.cuda.get_device_name(0)
        try:
            bandwidth = gpu_named(name.removesuffix(" Laptop GPU")).bandwidth
        except ConfigError:  # it is not in the table
            bandwidth = None
        return ModelPlace(name, bandwidth, None, _STATED, is_gpu=True)
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    if not measures:
        return ModelPlace("this machine's memory", None)
    from appliance.bench.bandwidth import HOW, probe

    found = probe([threads])[0]["read_gb_per_second"]
    return ModelPlace("this machine's memory", found, None, f"measured just now with {HOW}")
