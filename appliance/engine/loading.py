"""From settings to a loaded engine: device, precision, memory plan, weights, cache."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.execution import (
    NativeExecution,
    Precision,
    choose_execution,
    why_not_native,
)
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.kv_precision import choose_kv, in_words
from appliance.engine.load_tiers import load_tiers
from appliance.engine.memory_plan import MemoryPlan, MemoryRequest, plan_memory
from appliance.engine.messages import EngineInfo
from appliance.engine.rates import Rates
from appliance.engine.run.cuda_device import CudaDevice
from appliance.engine.run.device import HostDevice
from appliance.engine.runner_setup import Steps, make_runner, plan_measured
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.weights_fingerprint import weights_digest
from appliance.errors import ConfigError
from appliance.model.decoder import Decoder
from appliance.model.source import open_model
from appliance.runtime import release_unused, resident_bytes
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.beacon import Beacon
    from appliance.engine.execution import Execution
    from appliance.engine.run.device import Device
    from appliance.engine.runner import Runner
    from appliance.engine.tiers.tiers import Tiers
    from appliance.model.source import ModelSource

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Left to the rest of the system on a CPU, whose memory everything shares.
CPU_RESERVE = 0.10


def load_parts(
    config: EngineConfig,
    eos_token_ids: tuple[int, ...],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    device: Device | None = None,
    beacon: Beacon | None = None,
    source: ModelSource | None = None,
) -> tuple[Scheduler, Tiers, Runner, EngineInfo, Matchers]:
    """Load everything that an engine is made of; see `LLMEngine.load`.

    Args:
        config: see there.
        eos_token_ids: see there.
        metadata: see there.
        on_progress: see there.
        device: runs steps; None takes the GPU or the CPU, wherever the model goes.
        beacon: is told how far a step is.
        source: the model, opened already; None opens `config.model`.
    """
    begin = time.perf_counter()
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(threads)
    on_progress("reading the model", 0, 0)
    source = source or open_model(Path(config.model))
    # A tokenizer may name tokens that the model has no logits for, and so never generates.
    eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < source.spec.vocab_size)
    precision, kv_notes = _precision(config, source)
    execution, notes = choose_execution(config, precision, source, threads)
    if device is None:
        device = _open_device(precision.device)
    num_open = _num_open(config, source, precision, device)
    request = _memory_request(config, source, precision, execution, num_open)
    # Where the workspace is measured later, only what cannot fit at all is refused now.
    plan = plan_memory(replace(request, workspace_bytes=0) if device.is_asynchronous else request)
    executor = execution.load(source, on_progress, plan.context_length)
    release_unused()  # what weights were read with
    process_bytes = plan.process_bytes
    if process_bytes:  # more of the libraries is in use than before
        process_bytes = max(process_bytes, resident_bytes() - executor.weight_bytes)
    if beacon is not None and isinstance(execution, NativeExecution):
        execution.engine.watch(beacon.address)
    elif beacon is not None and isinstance(executor, Decoder):
        executor = replace(executor, on_layer=beacon.advance)
    limits = SchedulerLimits(
        config.max_num_seqs, config.max_num_batched_tokens, plan.context_length
    )
    sample_tokens = execution.sample_tokens(source.spec, limits.max_num_seqs)
    with_graphs = _may_capture(config, execution, device)
    steps = Steps(execution, executor, device, limits, sample_tokens, num_open, with_graphs)
    graph_bytes, rates = 0, Rates()
    matchers = Matchers(source.spec.vocab_size, eos_token_ids)
    if device.is_asynchronous:
        plan, graph_bytes = plan_measured(steps, request, on_progress)
    runner, moves = make_runner(steps, plan, graph_bytes, eos_token_ids, rates, matchers)
    blocks = BlockManager(
        plan.num_blocks,
        plan.block_size,
        metadata=BlockMetadata(metadata, num_blocks=plan.num_blocks),
        prefix_caching=config.prefix_caching,
        namespace=in_words(precision),
        num_open=num_open,
    )
    info = _describe(config, source, steps, plan, eos_token_ids, threads)
    info = msgspec.structs.replace(
        info,
        load_seconds=time.perf_counter() - begin,
        notes=(*kv_notes, *notes, *source.weights.notes(), *_host_notes(plan)),
        process_bytes=process_bytes,
    )
    tiers, tier_notes = load_tiers(
        config, blocks, moves, rates, info, precision, plan.kv_host_bytes
    )
    info = msgspec.structs.replace(info, notes=(*info.notes, *tier_notes))
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    scheduler = Scheduler(blocks, limits, eos_token_ids, look_ahead=runner.depth > 0, tiers=tiers)
    return scheduler, tiers, runner, info, matchers


def _open_device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def _may_capture(config: EngineConfig, execution: Execution, device: Device) -> bool:
    """Whether decode steps can become graphs.

    On a GPU plain torch functions read the host's numbers, which a captured graph would keep.
    """
    replays = execution.uses_triton or device.torch_device.type == "cpu"
    return config.cuda_graphs != "off" and device.is_asynchronous and replays


def _describe(
    config: EngineConfig,
    source: ModelSource,
    steps: Steps,
    plan: MemoryPlan,
    eos_token_ids: tuple[int, ...],
    threads: int,
) -> EngineInfo:
    execution, weight_format = steps.execution, steps.executor.weight_format
    precision = execution.precision
    kv_format = in_words(precision)
    arithmetic = (
        f"{weight_format} {execution.name} {precision.device} {precision.dtype} "
        f"{kv_format} {precision.block_size}"
    )
    return EngineInfo(
        model=Path(config.model).stem,
        architecture=source.spec.architecture,
        device=_device_name(precision.device, threads),
        backend=execution.name,
        weight_format=weight_format,
        kv_format=kv_format,
        context_length=plan.context_length,
        vocab_size=source.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        weight_bytes=steps.executor.weight_bytes,
        kv_bytes=plan.kv_bytes,
        workspace_bytes=plan.workspace_bytes,
        memory_bytes=plan.budget_bytes,
        load_seconds=0.0,
        fingerprint=_fingerprint(Path(config.model), arithmetic),
        # As `BlockManager` writes them: 1 is a block that has an open page.
        precisions=(kv_format, *(["int8 while open"] if steps.num_open else [])),
        kv_host_bytes=plan.kv_host_bytes,
    )


def _precision(config: EngineConfig, source: ModelSource) -> tuple[Precision, tuple[str, ...]]:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "--device cuda was asked for, but PyTorch sees no usable NVIDIA GPU; "
            "check nvidia-smi, or use --device cpu"
        )
    device = torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
    else:
        old_gpu = device.type == "cuda" and torch.cuda.get_device_capability() < (8, 0)
        dtype = torch.float16 if old_gpu else torch.bfloat16
    native = (
        device.type == "cpu" and config.kernels == "auto" and why_not_native(config, source) is None
    )
    return choose_kv(config, source, device, dtype, native=native)


def _num_open(
    config: EngineConfig, source: ModelSource, precision: Precision, device: Device
) -> int:
    if not precision.is_sealed(len(source.spec.layers)):
        return 0
    plans = 1 + int(device.is_asynchronous)
    return num_open_pages(
        config.max_num_seqs, config.max_num_batched_tokens, precision.block_size, plans=plans
    )


def _memory_request(
    config: EngineConfig,
    source: ModelSource,
    precision: Precision,
    execution: Execution,
    num_open: int,
) -> MemoryRequest:
    budget_bytes = memory_budget(precision.device, config.gpu_memory_utilization)
    # What is taken already is no longer among what is free, and part of what this process uses.
    process_bytes = resident_bytes() if precision.device.type == "cpu" else 0
    return MemoryRequest(
        spec=source.spec,
        weight_bytes=execution.weight_bytes(source),
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        kv_format=in_words(precision),
        block_size=precision.block_size,
        activation_bytes=execution.activation_bytes,
        budget_bytes=budget_bytes + process_bytes,
        process_bytes=process_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        fill=precision.device.type == "cuda",
        open_bytes=num_open * execution.open_page_bytes(source.spec),
        kv_host_memory=config.kv_host_memory,
        host_budget_bytes=None if precision.device.type == "cpu" else _host_budget(),
    )


def _host_notes(plan: MemoryPlan) -> tuple[str, ...]:
    """What to say where little is left for blocks that have to make room."""
    if not plan.host_is_short:
        return ()
    return (
        f"only {plan.kv_host_bytes / 2**20:,.0f} MiB of host memory are left for sequences that"
        " have to make room: long ones are computed again; --kv-host-memory says how much,"
        " --kv-cache-memory or --max-model-len leave more",
    )


def memory_budget(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that this process may take on a device now, beside what it has."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * gpu_memory_utilization) - (total - free)
    return _host_budget()


def _host_budget() -> int:
    available = psutil.virtual_memory().available
    return int(min(available, _cgroup_headroom()) * (1 - CPU_RESERVE))


def _cgroup_headroom() -> int:
    """Bytes that a container's limit leaves, or more than any machine has if there is no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else int(limit) - used


def _device_name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {threads} thread{'' if threads == 1 else 's'} of {os.cpu_count()}"


def _fingerprint(path: Path, arithmetic: str) -> str:
    """Changes when the answers to a seeded request may change: weights, formats, version."""
    digest = hashlib.blake2b(weights_digest(path), digest_size=8)
    digest.update(f"{__version__} {arithmetic}".encode())
    return f"fp_{digest.hexdigest()}"
