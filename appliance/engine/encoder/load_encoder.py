"""Loads the engine of an encoder: header, memory plan, weights. Imports no torch itself."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine.devices import device_name, note_unused_gpu
from appliance.engine.encoder.encoder_engine import EncoderEngine
from appliance.engine.encoder.encoder_execution import (
    choose_encoder_execution,
    max_step,
    memory_for,
    plan_encoder,
    threads_of,
)
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.served_model import fingerprint_of
from appliance.model.encoder.source import open_checked
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.memory.admission import Admission
    from appliance.engine.nouns.beacon import Beacon

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
    threads = threads_of(config)
    on_progress("reading the model", 0, 0)
    source = open_checked(Path(config.model))
    spec = source.spec
    execution, notes = choose_encoder_execution(config, source, threads)
    unused, notes = note_unused_gpu(config, notes)
    device = execution.device
    free, process_bytes = memory_for(config, device)
    # Asks other models first to make room.
    most = None if admission.limit is None else admission.limit - process_bytes
    plan = plan_encoder(config, source, execution, free if most is None else most, process_bytes)
    needed = plan.weight_bytes + plan.workspace_bytes
    admission.ask(needed + process_bytes, free + process_bytes)
    free, _ = memory_for(config, device)
    limit = free if most is None else min(free, most)
    plan = plan_encoder(config, source, execution, limit, process_bytes)
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
        context_length=plan.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=(),
        block_size=1,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        weight_bytes=plan.weight_bytes,
        kv_bytes=0,
        workspace_bytes=plan.workspace_bytes,
        memory_bytes=free + process_bytes,
        load_seconds=time.perf_counter() - begin,
        fingerprint=fingerprint_of(Path(config.model), arithmetic),
        num_parameters=source.num_parameters(),
        hidden_size=spec.hidden_size,
        process_bytes=process_bytes,
        ranks_pairs=encoder.ranking is not None,
        notes=notes,
        unused_gpu=unused,
        stages=tuple(stages),
    )
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    return EncoderEngine(encoder, info, max_step(config, plan.context_length), beacon)
