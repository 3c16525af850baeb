"""Chooses precision and requests memory before loading a model, here or for another GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.devices import choose_device, memory_budget
from appliance.engine.load.draft_source import open_draft
from appliance.engine.load.execution.choice import (
    choose_execution,
    why_no_library,
    why_not_native,
)
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.load.expert_choice import expert_choice
from appliance.engine.load.kv_precision import choose_kv, in_words
from appliance.engine.memory.plan import MemoryRequest
from appliance.engine.run.adapters.loader import planned_bytes, wants_adapters
from appliance.engine.served_model import settings_for
from appliance.kernels.arrays import numpy_dtype
from appliance.runtime import free_host_bytes, release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.draft_source import DraftSource
    from appliance.engine.load.execution.execution import Execution
    from appliance.model.source import ModelSource


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
    precision, execution = _execution_on(config, source, gpu_bytes)
    num_open = num_open_of(config, source, precision, precision.device.type == "cuda")
    draft = open_draft(config, source, execution)
    return execution, memory_of(config, source, precision, execution, num_open, draft, gpu_bytes)


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
    precision, execution = _execution_on(config, source, gpu_bytes)
    num_open = num_open_of(config, source, precision, precision.device.type == "cuda")
    return replace(
        request,
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        kv_format=in_words(precision),
        block_size=precision.block_size,
        open_bytes=num_open * execution.open_block_bytes(source.spec),
    )


def _execution_on(
    config: EngineConfig, source: ModelSource, gpu_bytes: int | None
) -> tuple[Precision, Execution]:
    """Choose what would run a model here, or on a GPU that need not be here."""
    if gpu_bytes is None:
        precision, _ = choose_precision(config, source)
        execution, _ = choose_execution(config, precision, source, config.threads or 1)
        return precision, execution
    import torch

    from appliance.engine.load.execution.fallback_execution import FallbackExecution
    from appliance.engine.load.execution.torch_execution import TorchExecution
    from appliance.kernels.backend import select_backend

    gpu = torch.device("cuda")
    precision, _ = choose_kv(config, source, gpu, torch.bfloat16, native=False)
    on_gpu = TorchExecution(precision, select_backend(gpu))
    return precision, FallbackExecution(on_gpu) if source.fallback is not None else on_gpu


def choose_precision(
    config: EngineConfig, source: ModelSource
) -> tuple[Precision, tuple[str, ...]]:
    """Choose device, activation dtype and KV cache format, with notes for the user.

    Raises:
        ConfigError: the device does not support a setting.
    """
    device = choose_device(config)
    name = "bfloat16" if config.dtype == "auto" else config.dtype
    in_library = device.type == "cpu" and config.kernels == "auto"
    if in_library and why_not_native(config, source) is None:
        return choose_kv(config, source, device, numpy_dtype(name), native=True)
    import torch

    if in_library and source.fallback is not None and why_no_library(config, source) is None:
        dtype = getattr(torch, name)
        return choose_kv(config, source, torch.device("cpu"), dtype, native=True)

    if device.type == "cuda" and config.dtype == "auto":
        name = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    return choose_kv(config, source, torch.device(device.type), getattr(torch, name), native=False)


def num_open_of(
    config: EngineConfig, source: ModelSource, precision: Precision, is_asynchronous: bool
) -> int:
    """Return the number of open blocks; 0 without sealed layers."""
    if not precision.is_sealed(len(source.spec.cache_layers)):
        return 0
    plans = 1 + int(is_asynchronous)
    return num_open_blocks(
        config.max_num_seqs, config.max_num_batched_tokens, precision.block_size, plans=plans
    )


def memory_of(
    config: EngineConfig,
    source: ModelSource,
    precision: Precision,
    execution: Execution,
    num_open: int,
    draft: DraftSource | None,
    gpu_bytes: int | None = None,
) -> MemoryRequest:
    """Build the request from the memory free now, or a GPU's; see `request_memory`."""
    if gpu_bytes is None:
        budget_bytes = memory_budget(precision.device, config.gpu_memory_utilization)
    else:
        budget_bytes = int(gpu_bytes * config.gpu_memory_utilization)
    if draft is not None or wants_adapters(config):
        import torch  # noqa: F401  # they need it later; the plan has to know what it takes
    release_unused()  # the weights need it next
    # Memory already taken is not free any more, and counts as this process's use.
    process_bytes = resident_bytes() if precision.device.type == "cpu" else 0
    in_table = not isinstance(execution, NativeExecution)
    ranks = execution.ranks if precision.device.type == "cpu" else None  # a GPU plans for itself
    copies = 1 if ranks is None else ranks.size
    others = 0 if ranks is None else ranks.process_bytes(source, in_torch=in_table)
    taken = process_bytes + (0 if ranks is None else ranks.taken_bytes(in_torch=in_table))
    of_adapters = planned_bytes(config, source, precision.dtype.itemsize, in_table=in_table)
    request = MemoryRequest(
        spec=source.spec,
        weight_bytes=execution.weight_bytes(source),
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        kv_format=in_words(precision),
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
        kv_host_memory=config.kv_host_memory,
        prefix_caching=config.prefix_caching,
        state_checkpoint_memory=config.state_checkpoint_memory,
        adapter_bytes=copies * of_adapters,
        state_bytes=execution.state_bytes(source.spec),
        host_budget_bytes=None if precision.device.type == "cpu" else free_host_bytes(),
        experts=expert_choice(config, source, execution),
        rounded=partial(_rounded_bytes, config, source, execution),
    )
    return request if draft is None else draft.added_to(request)


def _rounded_bytes(
    config: EngineConfig, source: ModelSource, execution: Execution
) -> Iterator[tuple[int, int]]:
    """Yield fewer bits of the weights that --weight-bits could name, and the bytes with them."""
    from appliance.model.narrowed import narrowed

    for bits in (8, 4):
        if config.weight_bits is None or bits < config.weight_bits:
            found = narrowed(source, bits)
            if found is not None:
                yield bits, execution.weight_bytes(found)
