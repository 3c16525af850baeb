"""Requests and plans memory before loading a model, here or for another GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, cast

import psutil

from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.devices import memory_budget
from appliance.engine.load.draft import open_draft
from appliance.engine.load.execution.choice import choose_execution
from appliance.engine.load.kv_precision import choose_kv
from appliance.engine.load.pictures import open_pictures
from appliance.engine.memory.experts.split import ExpertChoice, LayerExperts
from appliance.engine.memory.experts.streaming import LayerWork, Streaming
from appliance.engine.memory.plan import MemoryRequest, plan_memory, settled_by_estimate
from appliance.engine.run.adapters.loader import planned_bytes, wants_adapters
from appliance.engine.served_model import settings_for
from appliance.errors import ConfigError
from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.cpu.library import LibraryError, load_library
from appliance.model.size import native_slot_bytes, slot_bytes
from appliance.model.spec import ExpertsSpec
from appliance.runtime import free_host_bytes, release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.draft import DraftSource
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.load.pictures import PictureSource
    from appliance.engine.memory.admission import Admission
    from appliance.engine.memory.plan import MemoryPlan
    from appliance.engine.run.device import Device
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


def request_memory(
    config: EngineConfig, source: ModelSource, gpu_bytes: int | None = None
) -> tuple[Execution, MemoryRequest]:
    """Collect a model's memory needs without loading it.

    Args:
        gpu_bytes: free memory of a GPU, which need not be here; None plans for this machine.

    Returns:
        The execution, and its request for `plan_memory`.

    Raises:
        ConfigError: the device does not support a setting.
    """
    config = settings_for(config, source)
    execution = _execution_on(config, source, gpu_bytes)
    draft = open_draft(config, source, execution)
    num_open = _num_open_on(config, execution.precision)
    pictures, _ = open_pictures(config, source)
    if pictures is not None:
        config = pictures.with_room(config)
    return execution, _request(config, source, execution, num_open, draft, pictures, gpu_bytes)


def with_other_cache(
    request: MemoryRequest, config: EngineConfig, source: ModelSource, gpu_bytes: int | None
) -> MemoryRequest:
    """Change the KV precision of a request without a draft model; weights are not measured again.

    Args:
        config: the request's own, but for `kv_cache_dtype`.
        gpu_bytes: as for `request_memory`.

    Raises:
        ConfigError: the device does not support the precision.
    """
    execution = _execution_on(config, source, gpu_bytes)
    precision = execution.precision
    num_open = _num_open_on(config, precision)
    return replace(
        request,
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        kv_format=precision.kv_in_words(),
        block_size=precision.block_size,
        open_bytes=num_open * execution.open_block_bytes(source.spec),
    )


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory of a model that is being loaded.

    Attributes:
        plan: answers the request.
        num_open: open blocks; 0 without sealed layers.
        is_measured: steps are run after loading to see what they take, and the rest divided then.
    """

    request: MemoryRequest
    plan: MemoryPlan
    num_open: int
    is_measured: bool


def plan_model(
    config: EngineConfig,
    source: ModelSource,
    execution: Execution,
    device: Device,
    draft: DraftSource | None,
    pictures: PictureSource | None,
    admission: Admission,
) -> ModelMemory:
    """Plan a model's memory here, once others have made room for it.

    Raises:
        ConfigError: model or machine do not support a setting.
        MemoryPlanError: it does not fit.
    """
    num_open = _num_open(config, execution.precision, is_asynchronous=device.is_asynchronous)
    # Steps with caches of classes were measured when these were opened.
    measured = device.is_asynchronous and source.spec.own_cache is None
    request = admission.plan(
        partial(_request, config, source, execution, num_open, draft, pictures), measured=measured
    )
    if not measured:
        return ModelMemory(request, plan_memory(request), num_open, is_measured=False)
    request = settled_by_estimate(request)
    # If the workspace is measured later, refuse only a model that cannot fit.
    plan = plan_memory(replace(request, workspace_bytes=0))
    return ModelMemory(request, plan, num_open, is_measured=True)


def _execution_on(config: EngineConfig, source: ModelSource, gpu_bytes: int | None) -> Execution:
    """Choose what would run a model here, or on a GPU that need not be here."""
    if gpu_bytes is None:
        return choose_execution(config, source, config.threads or 1)[0]
    import torch

    from appliance.engine.load.execution.fallback_execution import FallbackExecution
    from appliance.engine.load.execution.torch_execution import TorchExecution
    from appliance.kernels.backend import select_backend

    gpu = torch.device("cuda")
    precision, _ = choose_kv(config, source, gpu, torch.bfloat16, native=False)
    on_gpu = TorchExecution(precision, select_backend(gpu))
    return FallbackExecution(on_gpu) if source.fallback is not None else on_gpu


def _num_open_on(config: EngineConfig, precision: Precision) -> int:
    """Return the number of open blocks on a device of a kind."""
    return _num_open(config, precision, is_asynchronous=precision.device.type == "cuda")


def _num_open(config: EngineConfig, precision: Precision, *, is_asynchronous: bool) -> int:
    """Return the number of open blocks; 0 without sealed layers."""
    if not any(layer.format.is_sealed for layer in precision.kv_layers):
        return 0
    plans = 1 + int(is_asynchronous)
    return num_open_blocks(
        config.max_num_seqs, config.max_num_batched_tokens, precision.block_size, plans=plans
    )


def _request(
    config: EngineConfig,
    source: ModelSource,
    execution: Execution,
    num_open: int,
    draft: DraftSource | None,
    pictures: PictureSource | None,
    gpu_bytes: int | None = None,
) -> MemoryRequest:
    """Build the request from the memory free now, or a GPU's; see `request_memory`."""
    precision, experts = execution.precision, expert_choice(config, source, execution)
    if gpu_bytes is None:
        budget_bytes = memory_budget(precision.device, config.gpu_memory_utilization)
    else:
        budget_bytes = int(gpu_bytes * config.gpu_memory_utilization)
    if draft is not None or wants_adapters(config):
        import torch  # noqa: F401  # they need it later; the plan has to know what it takes
    release_unused()  # the weights need it next
    # Memory already taken is not free any more, and counts as this process's use.
    process_bytes = resident_bytes() if precision.device.type == "cpu" else 0
    in_table = not execution.in_library
    ranks = execution.ranks if precision.device.type == "cpu" else None  # a GPU plans for itself
    copies = 1 if ranks is None else ranks.size
    others = 0 if ranks is None else ranks.process_bytes(source, in_torch=in_table)
    taken = process_bytes + (0 if ranks is None else ranks.taken_bytes(in_torch=in_table))
    of_adapters = planned_bytes(config, source, precision.dtype.itemsize, in_table=in_table)
    request = MemoryRequest(
        spec=source.spec,
        kv_format=precision.kv_in_words(),
        weight_bytes=execution.weight_bytes(source),
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        block_size=precision.block_size,
        activation_bytes=execution.activation_bytes,
        budget_bytes=budget_bytes + taken,
        process_bytes=process_bytes + others,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        fill=precision.device.type == "cuda",
        open_bytes=num_open * execution.open_block_bytes(source.spec),
        scratch_bytes=_scratch_bytes(config, source, execution),
        kv_host_memory=config.kv_host_memory,
        prefix_caching=config.prefix_caching,
        state_checkpoint_memory=config.state_checkpoint_memory,
        adapter_bytes=copies * of_adapters,
        state_bytes=execution.state_bytes(source.spec),
        narrow_state_bytes=_narrow_state_bytes(config, source, execution),
        host_budget_bytes=None if precision.device.type == "cpu" else free_host_bytes(),
        experts=experts,
        rounded=partial(_rounded_bytes, config, source, execution),
    )
    if pictures is not None:
        threads = config.threads or psutil.cpu_count(logical=False) or 1
        request = pictures.added_to(request, execution, threads)
    return request if draft is None else draft.added_to(request)


def _scratch_bytes(config: EngineConfig, source: ModelSource, execution: Execution) -> int:
    """Return the scratch on a GPU in which packed weights are made dense, a slice at a time."""
    if execution.precision.device.type != "cuda":
        return 0
    from appliance.kernels.packed_matmul.slices import SLICE_BYTES, WIDENED_ROWS

    weights = source.weights
    packed = any(slot.is_linear and weights.packed_bits(slot.name) for slot in source.slots())
    return SLICE_BYTES if packed and config.max_num_batched_tokens > WIDENED_ROWS else 0


def _rounded_bytes(
    config: EngineConfig, source: ModelSource, execution: Execution
) -> Iterator[tuple[str, int]]:
    """Yield settings that round weights to fewer bits, and the bytes with them."""
    from appliance.model.narrowed import narrowed

    for bits in (8, 4):
        if config.end_bits is None or bits < config.end_bits:
            found = narrowed(source, None, bits)
            if found is not None:
                yield f"--end-bits {bits}", execution.weight_bytes(found)
    for bits in (8, 4):
        if config.weight_bits is None or bits < config.weight_bits:
            found = narrowed(source, bits, config.end_bits)
            if found is not None:
                yield f"--weight-bits {bits}", execution.weight_bytes(found)


def _narrow_state_bytes(config: EngineConfig, source: ModelSource, execution: Execution) -> int:
    """Return a sequence's recurrent state in 16 bits; 0 if it cannot be, or the settings say."""
    spec = source.spec
    if spec.own_cache is not None or config.mamba_cache_dtype != "auto":
        return 0
    return execution.state_bytes(replace(spec, state_format=StateFormat.FP16))


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
    if execution.ranks is not None and not execution.in_library:
        return f"{execution.ranks.config.ranks_setting} divides experts; leave one of the two out"
    if execution.in_library:
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
