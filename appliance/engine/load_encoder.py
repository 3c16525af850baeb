"""Loads an encoder's engine, which runs in torch."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from appliance.engine.encoder_engine import EncoderEngine
from appliance.engine.engine_info import device_name, fingerprint_of
from appliance.engine.memory_request import choose_device, memory_budget
from appliance.engine.messages import EngineInfo
from appliance.errors import MemoryPlanError
from appliance.kernels.arrays import dtype_name
from appliance.model.encoder.encoder import load_encoder
from appliance.model.encoder.source import open_encoder
from appliance.model.encoder.spec import num_parameters
from appliance.runtime import release_unused, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.admission import Admission
    from appliance.engine.beacon import Beacon
    from appliance.model.encoder.spec import EncoderSpec

MIB = 2**20
_STREAMS = 6  # hidden states alive at once in a layer: the stream, QKV, heads' output, sum

logger = logging.getLogger(__name__)


def load_encoder_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon,
    admission: Admission,
) -> EncoderEngine:
    """Load an encoder.

    Raises:
        MemoryPlanError: it does not fit.
    """
    begin, stages = time.perf_counter(), [("imports", time.monotonic())]
    threads = config.threads or psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(threads)
    on_progress("reading the model", 0, 0)
    source = open_encoder(Path(config.model))
    spec, device = source.spec, torch.device(choose_device(config).type)
    # Users compare vectors by their last digits, and a small model has the time.
    dtype = getattr(torch, "float32" if config.dtype == "auto" else config.dtype)
    context = min(spec.context_length, config.max_model_len or spec.context_length)
    max_tokens = max(config.max_num_batched_tokens, context)
    weight_bytes = num_parameters(spec, source.names) * dtype.itemsize
    workspace_bytes = max_tokens * _row_bytes(spec, dtype)
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
    encoder = load_encoder(source, dtype, device, on_progress, beacon.advance)
    release_unused()
    stages.append(("weights", time.monotonic()))
    kind = dtype_name(dtype)
    info = EngineInfo(
        model=Path(config.model).stem,
        architecture=spec.architecture,
        device=device_name(device, threads),
        backend="torch",
        weight_format=kind,
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
        fingerprint=fingerprint_of(Path(config.model), f"{kind} torch {device} encoder"),
        hidden_size=spec.hidden_size,
        process_bytes=process_bytes,
        ranks_pairs=spec.ranking is not None,
        stages=tuple(stages),
    )
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    return EncoderEngine(encoder, info, max_tokens, beacon)


def _row_bytes(spec: EncoderSpec, dtype: torch.dtype) -> int:
    """Return the bytes of activations per token in the widest layer."""
    inner = spec.intermediate_size * (3 if spec.gated else 2)
    return (_STREAMS * spec.hidden_size + inner) * dtype.itemsize
