"""Loads an engine from its settings: header, memory plan, weights, runner, KV cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import psutil

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.devices import native_engine
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.load.draft_source import HeadDraft, open_draft
from appliance.engine.load.engine_info import describe, notes_on
from appliance.engine.load.execution.choice import choose_execution
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.load.kv_precision import in_words
from appliance.engine.load.memory_request import choose_precision, memory_of, num_open_of
from appliance.engine.load.runner_setup import RunnerParts, make_runner, plan_measured
from appliance.engine.load.speculation import check_speculation, load_speculator
from appliance.engine.load.tiers import load_tiers
from appliance.engine.memory.admission import Admission
from appliance.engine.memory.plan import plan_memory, settled_by_estimate
from appliance.engine.nouns.moves import Rates
from appliance.engine.ranks.ranked_adapters import RankedAdapterSlots
from appliance.engine.ranks.ranked_decoder import RankedDecoder
from appliance.engine.run.adapters.loader import AdapterLoader
from appliance.engine.run.cuda_graphs import PROMPTS
from appliance.engine.run.hidden_rows import HiddenRows
from appliance.engine.run.host_device import HostDevice, NativeDevice
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.served_model import open_served, settings_for
from appliance.model.native import NativeDecoder
from appliance.runtime import release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.draft_source import DraftSource
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.memory.plan import MemoryPlan, MemoryRequest
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.run.device import Device
    from appliance.engine.run.runner import Runner
    from appliance.engine.tiers.tiers import Tiers
    from appliance.model.adapters.torch_slots import TorchAdapterSlots
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

logger = logging.getLogger(__name__)


class EngineParts(NamedTuple):
    """The parts of an engine, in the order of `LLMEngine`'s arguments."""

    scheduler: Scheduler
    tiers: Tiers
    runner: Runner
    info: EngineInfo
    matchers: Matchers
    adapters: AdapterLoader | None


def load_parts(
    config: EngineConfig,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    device: Device | None = None,
    beacon: Beacon | None = None,
    source: ModelSource | None = None,
    admission: Admission | None = None,
) -> EngineParts:
    """Load all parts of an engine; see `load_llm_engine`.

    Args:
        device: runs steps; None chooses the model's GPU or CPU.
        source: the opened model; None opens `config.model`.
        admission: memory shared with other models; None takes all that is free.
    """
    begin = time.perf_counter()
    stages = [("imports", time.monotonic())]
    on_progress("reading the model", 0, 0)
    source = source or open_served(config)
    config = settings_for(config, source)
    opened = _open(config, source, device)
    request, plan = _plan(config, opened, admission or Admission())
    opened = _with_host(config, opened, plan)
    stages.append(("header and plan", time.monotonic()))
    executor = opened.execution.load(source, on_progress, plan.context_length, beacon)
    if isinstance(executor, RankedDecoder):
        opened = replace(opened, device=executor.device_of_ranks(opened.device))
    release_unused()  # memory for reading the weights
    process_bytes = _process_bytes(plan, executor)
    stages.append(("weights", time.monotonic()))
    if callable(eos_token_ids):
        eos_token_ids = eos_token_ids()
    # A tokenizer may name tokens without logits, which the model never generates.
    eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < source.spec.vocab_size)
    matchers, rates = Matchers(source.spec.vocab_size, eos_token_ids), Rates()
    adapters = AdapterLoader.of(config, source, executor)
    if adapters is not None and opened.execution.uses_triton:
        from appliance.engine.run.kernels_ahead import compile_adapters

        slots = adapters.slots
        if isinstance(slots, RankedAdapterSlots):
            slots = slots.own
        compile_adapters(cast("TorchAdapterSlots", slots), on_progress)
    parts = _runner_parts(config, opened, executor, plan.context_length)
    graph_bytes, kept = 0, None
    if isinstance(opened.draft, HeadDraft):
        assert isinstance(executor, NativeDecoder)
        kept = HiddenRows(executor, opened.draft.head.reads)
    if _is_measured(opened):
        plan, graph_bytes = plan_measured(parts, request, on_progress)
    runner, moves, states = make_runner(
        *(parts, plan, graph_bytes, eos_token_ids, rates, matchers),
        adapters=None if adapters is None else adapters.slots,
        kept=kept,
    )
    runner.capture(on_progress)
    blocks = _block_manager(config, opened, plan, metadata)
    info = msgspec.structs.replace(
        describe(config, source, parts, plan, eos_token_ids, opened.threads),
        load_seconds=time.perf_counter() - begin,
        process_bytes=process_bytes,
        num_adapters=0 if adapters is None else adapters.count,
        ranks=executor.ranks() if isinstance(executor, RankedDecoder) else (),
        drafts="" if opened.draft is None else opened.draft.in_words(),
        draft_bytes=request.draft_bytes,
    )
    tiers, tier_notes = load_tiers(
        config, blocks, moves, states, rates, info, opened.precision, plan.kv_host_bytes
    )
    stages.append(("KV cache", time.monotonic()))
    own_notes = notes_on(source, opened.device, plan, request, is_enqueued=executor.is_enqueued)
    has_notes = isinstance(executor, RankedDecoder) or source.spec.own_cache is not None
    of_executor = cast("Any", executor).notes() if has_notes else ()
    notes = (*opened.notes, *of_executor, *own_notes, *tier_notes)
    info = msgspec.structs.replace(info, notes=notes, stages=tuple(stages))
    scheduler = Scheduler(
        blocks,
        parts.limits,
        eos_token_ids,
        look_ahead=runner.depth > 0,
        tiers=tiers,
        speculator=load_speculator(
            *(config, opened.execution, opened.device, matchers, plan, opened.draft),
            target=executor if isinstance(executor, NativeDecoder) else None,
            kept=kept,
        ),
    )
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    return EngineParts(scheduler, tiers, runner, info, matchers, adapters)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model before its weights are read, with its execution."""

    source: ModelSource
    precision: Precision
    execution: Execution
    device: Device
    threads: int
    num_open: int  # open blocks; 0 without sealed layers
    notes: tuple[str, ...]
    draft: DraftSource | None


def _open(config: EngineConfig, source: ModelSource, device: Device | None) -> _Opened:
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    precision, kv_notes = choose_precision(config, source)
    execution, notes = choose_execution(config, precision, source, threads)
    device = device or _device_of(execution, threads)
    draft = open_draft(config, source, execution)
    check_speculation(config, execution, device)
    execution = execution.started(source)
    if execution.ranks is not None:
        notes += execution.ranks.notes()
    num_open = num_open_of(config, source, precision, device.is_asynchronous)
    notes = (*kv_notes, *notes)
    return _Opened(source, precision, execution, device, threads, num_open, notes, draft)


def _device_of(execution: Execution, threads: int) -> Device:
    if isinstance(execution, NativeExecution):
        return NativeDevice()
    import torch

    torch.set_num_threads(threads)
    where = execution.precision.device
    if not isinstance(where, torch.device) or where.type != "cuda":
        return HostDevice()
    from appliance.engine.run.cuda_device import CudaDevice

    return CudaDevice(where)


def _plan(
    config: EngineConfig, opened: _Opened, admission: Admission
) -> tuple[MemoryRequest, MemoryPlan]:
    measured = _is_measured(opened)
    chosen = (opened.source, opened.precision, opened.execution, opened.num_open, opened.draft)
    request = admission.plan(partial(memory_of, config, *chosen), measured=measured)
    if not measured:
        return request, plan_memory(request)
    request = settled_by_estimate(request)
    # If the workspace is measured later, refuse only a model that cannot fit.
    return request, plan_memory(replace(request, workspace_bytes=0))


def _is_measured(opened: _Opened) -> bool:
    """Return True if steps are run to see what they take; caches of classes are measured before."""
    return opened.device.is_asynchronous and opened.source.spec.own_cache is None


def _with_host(config: EngineConfig, opened: _Opened, plan: MemoryPlan) -> _Opened:
    """Start the CPU library for experts in host memory."""
    if not plan.host_experts.layers:
        return opened
    from appliance.engine.load.execution.torch_execution import HostPart, TorchExecution

    assert isinstance(opened.execution, TorchExecution)
    engine, isa = native_engine(config, opened.threads)
    host = HostPart(plan.host_experts, engine, isa.name)
    return replace(opened, execution=replace(opened.execution, host=host))


def _process_bytes(plan: MemoryPlan, executor: Executor[Any]) -> int:
    """Return the process's bytes without the model; libraries have grown since the plan."""
    if not plan.process_bytes:
        return 0
    weight_bytes = executor.weight_bytes + plan.host_experts.num_bytes
    return max(plan.process_bytes, resident_bytes() - weight_bytes)


def _runner_parts(
    config: EngineConfig, opened: _Opened, executor: Executor[Any], context_length: int
) -> RunnerParts:
    source, execution, device = opened.source, opened.execution, opened.device
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        context_length,
        verifies=config.speculate != "off",
    )
    most = max(limits.sample_rows, limits.max_num_seqs + PROMPTS)
    sample_tokens = execution.sample_tokens(source.spec, most)
    with_graphs = _may_capture(config, execution, device) and executor.is_enqueued
    return RunnerParts(
        execution, executor, device, limits, sample_tokens, opened.num_open, with_graphs
    )


def _block_manager(
    config: EngineConfig, opened: _Opened, plan: MemoryPlan, metadata: memoryview | None
) -> BlockManager:
    memory = plan.states
    states = StateSlots(memory.num_slots, memory.num_checkpoints, memory.row_bytes)
    return BlockManager(
        plan.num_blocks,
        plan.block_size,
        metadata=BlockMetadata(metadata, num_blocks=plan.num_blocks),
        prefix_caching=config.prefix_caching,
        namespace=in_words(opened.precision),
        num_open=opened.num_open,
        states=states if memory.row_bytes else None,
        holds_copies=opened.source.spec.own_cache is not None,
    )


def _may_capture(config: EngineConfig, execution: Execution, device: Device) -> bool:
    """Return True if steps can become graphs.

    On a GPU plain torch functions read numbers on the host, which a captured graph would freeze.
    """
    if config.cuda_graphs == "off" or not device.is_asynchronous:
        return False
    return execution.uses_triton or device.torch_device.type == "cpu"
