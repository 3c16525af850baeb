"""Loads the engine of an encoder: header, memory plan, weights. Imports no torch itself."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from appliance.engine.devices import device_name, memory_budget
from appliance.engine.encoder.encoder_engine import EncoderEngine
from appliance.engine.encoder.encoder_execution import choose_encoder_execution
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.served_model import fingerprint_of
from appliance.errors import MemoryPlanError
from appliance.model.encoder.source import open_reader
from appliance.runtime import release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.memory.admission import Admission
    from appliance.engine.nouns.beacon import Beacon

MIB = 2**20

logger = logging.getLogger(__name__)


def load_encoder_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon,
    admission: Admission,
) -> EncoderEngine:
    """Load an encoder.

    Raises:
        ConfigError: the settings ask for something that it cannot do.
        MemoryPlanError: it does not fit.
    """
    begin, stages = time.perf_counter(), [("imports", time.monotonic())]
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    on_progress("reading the model", 0, 0)
    source = open_reader(Path(config.model))
    spec = source.spec
    execution, notes = choose_encoder_execution(config, source, threads)
    device = execution.device
    context = min(spec.context_length, config.max_model_len or spec.context_length)
    max_tokens = max(config.max_num_batched_tokens, context)
    weight_bytes, workspace_bytes = execution.weight_bytes, execution.workspace_bytes(max_tokens)
    free = memory_budget(device, config.gpu_memory_utilization)
    process_bytes = resident_bytes() if device.type == "cpu" else 0
    needed = weight_bytes + workspace_bytes

    def check(limit: int) -> None:
        if needed > limit:
            raise MemoryPlanError(
                f"{config.model} does not fit: weights {weight_bytes / MIB:,.0f} MiB + workspace "
                f"{workspace_bytes / MIB:,.0f} MiB for steps of {max_tokens:,} tokens, and "
                f"{limit / MIB:,.0f} MiB are free; --max-num-batched-tokens and --max-model-len "
                "make the workspace smaller"
            )

    # Asks other models first to make room.
    most = None if admission.limit is None else admission.limit - process_bytes
    check(free if most is None else most)
    admission.ask(needed + process_bytes, free + process_bytes)
    free = memory_budget(device, config.gpu_memory_utilization)
    check(free if most is None else min(free, most))
    stages.append(("header and plan", time.monotonic()))
    encoder = execution.load(on_progress, beacon)
    release_unused()
    stages.append(("weights", time.monotonic()))
    arithmetic = f"{encoder.weight_format} {execution.name} {device} encoder"
    info = EngineInfo(
        model=Path(config.model).stem,
        architecture=spec.architecture,
        device=device_name(device, threads),
        backend=execution.name,
        weight_format=encoder.weight_format,
        kv_format="none",
        context_length=context,
        vocab_size=spec.vocab_size,
        eos_token_ids=(),
        block_size=1,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        weight_bytes=weight_bytes,
        kv_bytes=0,
        workspace_bytes=workspace_bytes,
        memory_bytes=free + process_bytes,
        load_seconds=time.perf_counter() - begin,
        fingerprint=fingerprint_of(Path(config.model), arithmetic),
        num_parameters=source.num_parameters(),
        hidden_size=spec.hidden_size,
        process_bytes=process_bytes,
        ranks_pairs=encoder.ranking is not None,
        notes=notes,
        stages=tuple(stages),
    )
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    return EncoderEngine(encoder, info, max_tokens, beacon)
