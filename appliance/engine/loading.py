"""Loads an engine from its settings: device, precision, memory plan, weights, cache."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from appliance.engine.adapters.loader import AdapterLoader, check_adapters, planned_bytes
from appliance.engine.admission import Admission
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.execution.choice import choose_execution, why_not_native
from appliance.engine.execution.native_execution import NativeExecution
from appliance.engine.execution.torch_execution import TorchExecution
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.kv_precision import choose_kv, in_words
from appliance.engine.load_speculation import load_speculator
from appliance.engine.load_tiers import load_tiers
from appliance.engine.memory_plan import MemoryPlan, MemoryRequest, plan_memory
from appliance.engine.messages import EngineInfo
from appliance.engine.rates import Rates
from appliance.engine.run.cuda_device import CudaDevice
from appliance.engine.run.cuda_graphs import PROMPTS
from appliance.engine.run.device import HostDevice
from appliance.engine.runner_setup import RunnerParts, make_runner, plan_measured
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.weights_fingerprint import weights_digest
from appliance.errors import ConfigError
from appliance.kernels.backend import select_backend
from appliance.model.decoder import Decoder
from appliance.model.source import open_model
from appliance.runtime import release_unused, resident_bytes
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.beacon import Beacon
    from appliance.engine.execution.execution import Execution, Precision
    from appliance.engine.run.device import Device
    from appliance.engine.runner import Runner
    from appliance.engine.state_memory import StateMemory
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
    admission: Admission | None = None,
) -> tuple[Scheduler, Tiers, Runner, EngineInfo, Matchers, AdapterLoader | None]:
    """Load all parts of an engine; see `LLMEngine.load`.

    Args:
        device: runs steps; None takes the GPU or the CPU, wherever the model goes.
        beacon: counts a step's progress.
        source: the model, if opened already; None opens `config.model`.
        admission: the memory that it may take among others; None is all that is free.
    """
    begin = time.perf_counter()
    stages = [("imports", time.monotonic())]
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(threads)
    on_progress("reading the model", 0, 0)
    source = source or open_model(Path(config.model))
    # A tokenizer may name tokens for which the model has no logits, so it never generates them.
    eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < source.spec.vocab_size)
    precision, kv_notes = _precision(config, source)
    check_adapters(config, precision.device)
    execution, notes = choose_execution(config, precision, source, threads)
    if device is None:
        device = _open_device(precision.device)
    num_open = _num_open(config, source, precision, device.is_asynchronous)
    request = (admission or Admission()).plan(
        partial(_memory_request, config, source, precision, execution, num_open),
        measured=device.is_asynchronous,
    )
    # Where the workspace is measured later, refuse only what cannot fit at all.
    plan = plan_memory(replace(request, workspace_bytes=0) if device.is_asynchronous else request)
    stages.append(("header and plan", time.monotonic()))
    executor = execution.load(source, on_progress, plan.context_length)
    stages.append(("weights", time.monotonic()))
    release_unused()  # memory that reading the weights took
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
    sample_tokens = execution.sample_tokens(source.spec, limits.max_num_seqs + PROMPTS)
    in_torch = source.spec.has_experts or source.spec.state_bytes > 0  # on a GPU too
    with_graphs = _may_capture(config, execution, device) and not in_torch
    parts = RunnerParts(execution, executor, device, limits, sample_tokens, num_open, with_graphs)
    graph_bytes, rates = 0, Rates()
    matchers = Matchers(source.spec.vocab_size, eos_token_ids)
    if device.is_asynchronous:
        plan, graph_bytes = plan_measured(parts, request, on_progress)
    adapters = AdapterLoader.of(config, source, executor)
    runner, moves, states = make_runner(
        *(parts, plan, graph_bytes, eos_token_ids, rates, matchers),
        adapters=None if adapters is None else adapters.slots,
    )
    runner.capture(on_progress)
    blocks = BlockManager(
        plan.num_blocks,
        plan.block_size,
        metadata=BlockMetadata(metadata, num_blocks=plan.num_blocks),
        prefix_caching=config.prefix_caching,
        namespace=in_words(precision),
        num_open=num_open,
        states=_state_slots(plan.states),
    )
    info = _describe(config, source, parts, plan, eos_token_ids, threads)
    info = msgspec.structs.replace(
        info,
        load_seconds=time.perf_counter() - begin,
        notes=(
            *kv_notes,
            *notes,
            *source.weights.notes(),
            *_torch_notes(source, device),
            *_host_notes(plan),
        ),
        process_bytes=process_bytes,
        num_adapters=0 if adapters is None else adapters.count,
        adapter_bytes=plan.adapter_bytes,
    )
    tiers, tier_notes = load_tiers(
        config, blocks, moves, states, rates, info, precision, plan.kv_host_bytes
    )
    stages.append(("KV cache", time.monotonic()))
    info = msgspec.structs.replace(info, notes=(*info.notes, *tier_notes), stages=tuple(stages))
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    scheduler = Scheduler(
        blocks,
        limits,
        eos_token_ids,
        look_ahead=runner.depth > 0,
        tiers=tiers,
        speculator=load_speculator(config, execution, device, matchers),
    )
    return scheduler, tiers, runner, info, matchers, adapters


def _state_slots(memory: StateMemory) -> StateSlots | None:
    if not memory.row_bytes:
        return None
    return StateSlots(memory.num_slots, memory.num_checkpoints, memory.row_bytes)


def _open_device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def _may_capture(config: EngineConfig, execution: Execution, device: Device) -> bool:
    """Return True if steps can become graphs.

    On a GPU plain torch functions read the host's numbers, which a captured graph would freeze.
    """
    replays = execution.uses_triton or device.torch_device.type == "cpu"
    return config.cuda_graphs != "off" and device.is_asynchronous and replays


def _describe(
    config: EngineConfig,
    source: ModelSource,
    parts: RunnerParts,
    plan: MemoryPlan,
    eos_token_ids: tuple[int, ...],
    threads: int,
) -> EngineInfo:
    execution, weight_format = parts.execution, parts.executor.weight_format
    precision = execution.precision
    kv_format, router = in_words(precision), source.spec.router
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
        weight_bytes=parts.executor.weight_bytes,
        kv_bytes=plan.kv_bytes,
        workspace_bytes=plan.workspace_bytes,
        memory_bytes=plan.budget_bytes,
        load_seconds=0.0,
        fingerprint=_fingerprint(Path(config.model), arithmetic),
        # As `BlockManager` writes them: 1 is a block with an open page.
        precisions=(kv_format, *(["int8 while open"] if parts.num_open else [])),
        kv_host_bytes=plan.kv_host_bytes,
        state_bytes=plan.states.num_bytes,
        num_checkpoints=plan.states.num_checkpoints,
        hidden_size=source.spec.hidden_size,
        num_experts=0 if router is None else router.num_experts,
        experts_per_token=0 if router is None else router.top_k,
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
    config: EngineConfig, source: ModelSource, precision: Precision, is_asynchronous: bool
) -> int:
    if not precision.is_sealed(len(source.spec.cache_layers)):
        return 0
    plans = 1 + int(is_asynchronous)
    return num_open_pages(
        config.max_num_seqs, config.max_num_batched_tokens, precision.block_size, plans=plans
    )


def request_memory(
    config: EngineConfig, source: ModelSource, gpu_bytes: int | None = None
) -> tuple[Execution, MemoryRequest]:
    """Collect what has to fit before a model is loaded, without loading it.

    Args:
        config: the settings.
        source: the model.
        gpu_bytes: free memory of a GPU, which need not be here; None plans for this machine.

    Returns:
        What would execute the model, and its request for `plan_memory`.

    Raises:
        ConfigError: the settings ask for something that the device cannot do.
    """
    if gpu_bytes is None:
        precision, _ = _precision(config, source)
        execution, _ = choose_execution(config, precision, source, config.threads or 1)
    else:
        gpu = torch.device("cuda")
        precision, _ = choose_kv(config, source, gpu, torch.bfloat16, native=False)
        execution = TorchExecution(precision, select_backend(gpu))
    num_open = _num_open(config, source, precision, precision.device.type == "cuda")
    return execution, _memory_request(config, source, precision, execution, num_open, gpu_bytes)


def _memory_request(
    config: EngineConfig,
    source: ModelSource,
    precision: Precision,
    execution: Execution,
    num_open: int,
    gpu_bytes: int | None = None,
) -> MemoryRequest:
    if gpu_bytes is None:
        budget_bytes = memory_budget(precision.device, config.gpu_memory_utilization)
    else:
        budget_bytes = int(gpu_bytes * config.gpu_memory_utilization)
    # Memory taken already is not free any more, and counts as this process's use.
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
        prefix_caching=config.prefix_caching,
        state_checkpoint_memory=config.state_checkpoint_memory,
        adapter_bytes=planned_bytes(config, source, precision.dtype.itemsize),
        host_budget_bytes=None if precision.device.type == "cpu" else _host_budget(),
    )


def _torch_notes(source: ModelSource, device: Device) -> tuple[str, ...]:
    """Build notes on what runs on a GPU without a kernel of its own."""
    if device.torch_device.type != "cuda":
        return ()
    notes = []
    if source.spec.has_experts:
        notes.append("experts run one after another on the GPU, without graphs: slower than can be")
    if source.spec.state_bytes:
        notes.append("recurrent layers run in torch on the GPU, without graphs: slower than can be")
    return tuple(notes)


def _host_notes(plan: MemoryPlan) -> tuple[str, ...]:
    """Build a note if little is left for blocks that have to leave the cache."""
    if not plan.host_is_short:
        return ()
    return (
        f"only {plan.kv_host_bytes / 2**20:,.0f} MiB of host memory are left for sequences that"
        " have to make room: long ones are computed again; --kv-host-memory says how much,"
        " --kv-cache-memory or --max-model-len leave more",
    )


def memory_budget(device: torch.device, gpu_memory_utilization: float) -> int:
    """Return the bytes that this process may still take on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * gpu_memory_utilization) - (total - free)
    return _host_budget()


def _host_budget() -> int:
    available = psutil.virtual_memory().available
    return int(min(available, _cgroup_headroom()) * (1 - CPU_RESERVE))


def _cgroup_headroom() -> int:
    """Return the bytes below a container's limit; without one, more than any machine has."""
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
