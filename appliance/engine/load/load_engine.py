"""Loads the engine for a model, stage by stage: one with a KV cache, or an encoder's."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from appliance.engine.devices import note_unused_gpu
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.load.draft import check_speculation, load_speculator, open_draft
from appliance.engine.load.engine_info import describe
from appliance.engine.load.execution.choice import choose_execution
from appliance.engine.load.kv_cache import make_kv_cache
from appliance.engine.load.memory_request import plan_model
from appliance.engine.load.pictures import open_pictures
from appliance.engine.load.runner import RunnerParts, load_runner
from appliance.engine.load.tuning import tune_at_start
from appliance.engine.memory.admission import Admission
from appliance.engine.nouns.beacon import Beacon
from appliance.engine.nouns.moves import Rates
from appliance.engine.run.adapters.loader import AdapterLoader, configured_adapters
from appliance.engine.scheduling.scheduler import Scheduler
from appliance.engine.served_model import open_served, settings_for
from appliance.errors import ConfigError, MemoryPlanError
from appliance.model.encoder.source import reads_only
from appliance.runtime import release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.encoder.encoder_engine import EncoderEngine
    from appliance.engine.memory.plan import MemoryPlan
    from appliance.engine.run.device import Device
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

logger = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    *,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon | None = None,
    admission: Admission | None = None,
) -> LLMEngine | EncoderEngine:
    """Load a model of any kind; arguments and errors as for `load_llm_engine`."""
    if reads_only(Path(config.model)):
        if config.is_divided:
            raise ConfigError(
                f"{config.model} only reads texts, and one process runs it whole; leave out"
                " --ranks, --tensor-parallel, --pipeline-parallel and --gpu-split"
            )
        from appliance.engine.encoder.load_encoder import load_encoder_engine

        return load_encoder_engine(
            config, on_progress, beacon or Beacon(), admission or Admission()
        )
    return load_llm_engine(
        config, eos_token_ids, metadata, on_progress, beacon=beacon, admission=admission
    )


def load_llm_engine(
    config: EngineConfig,
    eos_token_ids: tuple[int, ...] | Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    device: Device | None = None,
    *,
    beacon: Beacon | None = None,
    source: ModelSource | None = None,
    admission: Admission | None = None,
) -> LLMEngine:
    """Plan memory, then load a model that generates.

    Args:
        config: the settings; `model` is a path.
        eos_token_ids: tokens that end an answer, or a function that returns them, called once the
            weights are read.
        metadata: memory for block metadata; None keeps it private.
        on_progress: called with stage, done, total.
        device: runs steps; None chooses the model's GPU or CPU.
        beacon: shows progress to other processes; None keeps it private.
        source: the opened model; None opens `config.model`.
        admission: memory shared with other models; None takes all that is free.

    Raises:
        ModelError: the model cannot be read or is not supported.
        MemoryPlanError: it does not fit.
    """
    begin = time.perf_counter()
    stages = [("imports", time.monotonic())]
    on_progress("reading the model", 0, 0)
    source = source or open_served(config)
    config = settings_for(config, source)
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    execution, notes = choose_execution(config, source, threads)
    unused, notes = note_unused_gpu(config, notes)
    device = device or execution.step_device(threads)
    draft = open_draft(config, source, execution)
    check_speculation(config, execution, device)
    pictures, why_none = open_pictures(config, source)
    notes += why_none
    if pictures is not None:
        config = pictures.with_room(config)
    execution = execution.started(source)
    if draft is not None and pictures is not None and not draft.is_asked_for:
        draft = None  # it knows nothing of what pictures say
    admission = admission or Admission()
    try:
        memory = plan_model(config, source, execution, device, draft, pictures, admission)
    except MemoryPlanError:
        if draft is None or draft.is_asked_for:
            raise
        notes += (f"{draft.name} does not draft, since there is no memory for it",)
        draft = None
        memory = plan_model(config, source, execution, device, draft, pictures, admission)
    execution = execution.with_host_experts(memory.plan.host_experts, config, threads)
    stages.append(("header and plan", time.monotonic()))

    executor = execution.load(source, on_progress, memory.plan.context_length, beacon)
    release_unused()  # memory for reading the weights
    process_bytes = _process_bytes(memory.plan, executor)
    queue = None
    if pictures is not None:
        queue = pictures.load(execution, device, threads, on_progress)
        release_unused()
    stages.append(("weights", time.monotonic()))

    if callable(eos_token_ids):
        eos_token_ids = eos_token_ids()
    # A tokenizer may name tokens without logits, which the model never generates.
    eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < source.spec.vocab_size)
    matchers, rates = Matchers(source.spec.vocab_size, eos_token_ids), Rates()
    if execution.uses_triton:
        kv_format = execution.precision.kv_format
        tune_at_start(config.tune, executor, config.max_num_batched_tokens, kv_format, on_progress)
    adapters = AdapterLoader.of(config, source, executor)
    kept = None if draft is None else draft.hidden_rows(executor)
    spare_rows = 0 if pictures is None else pictures.spare_rows
    parts = RunnerParts.of(config, execution, executor, device, memory, spare_rows)
    encoded = None if queue is None else queue.encoded
    loaded = load_runner(
        parts, memory, eos_token_ids, rates, matchers, adapters, kept, encoded, on_progress
    )
    memory = replace(memory, plan=loaded.plan)
    info = msgspec.structs.replace(
        describe(config, source, parts, memory, eos_token_ids, threads),
        load_seconds=time.perf_counter() - begin,
        process_bytes=process_bytes,
        num_adapters=0 if adapters is None else adapters.count,
        drafts="" if draft is None else draft.in_words(),
        unused_gpu=unused,
    )
    blocks, tiers, tier_notes = make_kv_cache(
        config, source, memory, loaded, metadata, rates, info, execution.precision
    )
    stages.append(("KV cache", time.monotonic()))
    info = msgspec.structs.replace(
        info, notes=(*notes, *info.notes, *tier_notes), stages=tuple(stages)
    )
    scheduler = Scheduler(
        blocks,
        parts.limits,
        eos_token_ids,
        look_ahead=loaded.runner.depth > 0,
        tiers=tiers,
        speculator=load_speculator(
            config, execution, parts.device, matchers, loaded.plan, draft, executor, kept
        ),
    )
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    engine = LLMEngine(
        scheduler, tiers, loaded.runner, info, matchers, adapters, beacon=beacon, pictures=queue
    )
    for ref in configured_adapters(config):
        engine.install_adapter(ref)
    return engine


def _process_bytes(plan: MemoryPlan, executor: Executor[Any]) -> int:
    """Return the process's bytes without the model; libraries have grown since the plan."""
    if not plan.process_bytes:
        return 0
    weight_bytes = executor.weight_bytes + plan.host_experts.num_bytes
    return max(plan.process_bytes, resident_bytes() - weight_bytes)
