"""Lists the layers whose experts may stay in host memory, by settings, model and machine."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import TYPE_CHECKING, cast

import psutil

from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.memory.experts.split import ExpertChoice, LayerExperts
from appliance.engine.memory.experts.streaming import LayerWork, Streaming
from appliance.errors import ConfigError
from appliance.kernels.cpu.library import LibraryError, load_library
from appliance.model.size import native_slot_bytes, slot_bytes
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.execution.execution import Execution
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


def expert_choice(
    config: EngineConfig, source: ModelSource, execution: Execution
) -> ExpertChoice | None:
    """Return the experts that may stay in host memory; None if nothing leaves the device.

    The last layer leaves first: for a prompt it computes only the rows that sample.

    Raises:
        ConfigError: model or machine does not support the settings.
    """
    asked = config.experts_on_cpu
    on_gpu = execution.precision.device.type == "cuda"
    if asked == 0 or (asked is None and not (on_gpu and source.spec.has_experts)):
        return None
    numbers = [i for i, one in enumerate(source.spec.layers) if isinstance(one.mlp, ExpertsSpec)]
    reason = _why_not(source, execution, len(numbers))
    if reason is None and asked is not None and asked > len(numbers):
        reason = f"{source.path.name} has experts in {len(numbers)} layers; ask for that or fewer"
    if reason is not None:
        if asked is None:
            return None
        raise ConfigError(f"--experts-on-cpu {asked} cannot be had: {reason}")
    layers = _layers(source, execution.precision)
    streaming = _streaming(config, source, execution.precision, list(layers.values()))
    return ExpertChoice(tuple(layers[i] for i in reversed(numbers)), asked, streaming)


def _why_not(source: ModelSource, execution: Execution, count: int) -> str | None:
    if not count:
        return f"{source.path.name} has no experts; leave it out"
    if execution.ranks is not None and not isinstance(execution, NativeExecution):
        return f"{execution.ranks.config.ranks_setting} divides experts; leave one of the two out"
    if isinstance(execution, NativeExecution):
        return "this engine runs on the CPU, where all experts are already; leave it out"
    try:
        load_library()
    except LibraryError as error:
        return str(error)
    return None


def _layers(source: ModelSource, precision: Precision) -> dict[int, LayerExperts]:
    device = cast("torch.device", precision.device)
    measures: list[Callable[[TensorSlot], float]] = [
        partial(slot_bytes, source, device=device, dtype=precision.dtype),
        partial(native_slot_bytes, source, dtype=precision.dtype),
    ]
    totals: dict[int, list[float]] = {}
    for slot in source.slots():
        if slot.expert is not None and slot.layer is not None:
            sums = totals.setdefault(slot.layer, [0.0, 0.0])
            for place, measure in enumerate(measures):
                sums[place] += measure(slot)
    return {
        layer: LayerExperts(layer, int(on_device), ceil(on_host))
        for layer, (on_device, on_host) in totals.items()
    }


def _streaming(
    config: EngineConfig, source: ModelSource, precision: Precision, layers: list[LayerExperts]
) -> Streaming:
    """Plan streams for the layer with the largest experts."""
    largest = max(layers, key=lambda one: one.host_bytes)
    mlp = source.spec.layers[largest.layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    width = mlp.latent or source.spec.hidden_size
    matrix = mlp.intermediate_size * width
    work = LayerWork(
        num_experts=mlp.router.num_experts,
        top_k=mlp.router.top_k,
        weights=(2 + mlp.gated) * matrix,
        host_bytes=largest.host_bytes,
        hidden_size=width,
        element_bytes=precision.dtype.itemsize,
        threads=config.threads or psutil.cpu_count(logical=False) or 1,
    )
    return Streaming.of(work, config.max_num_batched_tokens, matrix)
