"""From settings to a loaded engine: device, precision, memory plan, weights, cache."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from appliance.engine.block_manager import BlockManager
from appliance.engine.block_metadata import BlockMetadata
from appliance.engine.memory_plan import MemoryPlan, MemoryRequest, plan_memory
from appliance.engine.messages import EngineInfo
from appliance.engine.model_runner import ModelRunner
from appliance.engine.sampler import Sampler
from appliance.engine.scheduler import Scheduler, SchedulerLimits
from appliance.errors import ConfigError
from appliance.kernels.backend import select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.size import estimate_weight_bytes
from appliance.model.source import open_model
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.model.decoder import Decoder
    from appliance.model.spec import DecoderSpec

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_FORMAT_OF_DTYPE = {
    torch.bfloat16: KVFormat.BF16,
    torch.float16: KVFormat.FP16,
    torch.float32: KVFormat.FP32,
}
# Left to the rest of the system on a CPU, whose memory everything shares.
CPU_RESERVE = 0.10


@dataclass(frozen=True, slots=True)
class _Precision:
    """Element types that "auto" stands for on this device."""

    device: torch.device
    dtype: torch.dtype
    kv_format: KVFormat
    block_size: int


def load_parts(
    config: EngineConfig,
    eos_token_ids: tuple[int, ...],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
) -> tuple[Scheduler, ModelRunner, EngineInfo]:
    """Load everything that an engine is made of; see `LLMEngine.load`."""
    begin = time.perf_counter()
    torch.set_num_threads(config.threads or psutil.cpu_count(logical=False) or 1)
    precision = _precision(config)
    backend = select_backend(precision.device, config.kernels)
    on_progress("reading the model", 0, 0)
    source = open_model(Path(config.model))
    if backend.name == "triton":
        _check_kernels(source.spec, precision)
    weight_bytes = estimate_weight_bytes(source, precision.device, precision.dtype)
    plan = _plan(config, source.spec, precision, weight_bytes)
    decoder = load_decoder(
        source,
        backend,
        precision.device,
        precision.dtype,
        on_progress,
        context_length=plan.context_length,
    )
    caches = decoder.allocate_caches(
        precision.kv_format, num_blocks=plan.num_blocks, block_size=plan.block_size
    )
    blocks = BlockManager(
        plan.num_blocks,
        plan.block_size,
        metadata=BlockMetadata(
            metadata,
            num_blocks=plan.num_blocks,
            precision=list(KVFormat).index(precision.kv_format),
        ),
        prefix_caching=config.prefix_caching,
        namespace=precision.kv_format.value,
    )
    limits = SchedulerLimits(
        config.max_num_seqs, config.max_num_batched_tokens, plan.context_length
    )
    runner = ModelRunner(decoder, caches, Sampler(eos_token_ids), precision.device)
    info = _info(config, precision, plan, decoder, eos_token_ids, time.perf_counter() - begin)
    logger.info("loaded %s in %.2f s", config.model, info.load_seconds)
    return Scheduler(blocks, limits, eos_token_ids), runner, info


def _precision(config: EngineConfig) -> _Precision:
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
    kv_format = (
        _FORMAT_OF_DTYPE[dtype]
        if config.kv_cache_dtype == "auto"
        else KVFormat(config.kv_cache_dtype)
    )
    return _Precision(
        device=device,
        dtype=dtype,
        kv_format=kv_format,
        block_size=config.block_size or (32 if device.type == "cuda" else 16),
    )


def _check_kernels(spec: DecoderSpec, precision: _Precision) -> None:
    """Refuse a layer that no GPU kernel covers before memory is spent on it."""
    from appliance.kernels.paged_attention.launch import check_supported

    for layer in spec.layers:
        attention = layer.attention
        check_supported(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            precision.block_size,
            precision.dtype,
        )


def _plan(
    config: EngineConfig, spec: DecoderSpec, precision: _Precision, weight_bytes: int
) -> MemoryPlan:
    return plan_memory(
        MemoryRequest(
            spec=spec,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=sum(
                precision.kv_format.bytes_per_token(
                    layer.attention.num_kv_heads, layer.attention.head_dim
                )
                for layer in spec.layers
            ),
            kv_format=precision.kv_format.value,
            block_size=precision.block_size,
            activation_bytes=precision.dtype.itemsize,
            budget_bytes=memory_budget(precision.device, config.gpu_memory_utilization),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            kv_cache_memory=config.kv_cache_memory,
            fill=precision.device.type == "cuda",
        )
    )


def memory_budget(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that this process may take on a device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * gpu_memory_utilization) - (total - free)
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


def _info(
    config: EngineConfig,
    precision: _Precision,
    plan: MemoryPlan,
    decoder: Decoder,
    eos_token_ids: tuple[int, ...],
    load_seconds: float,
) -> EngineInfo:
    device = (
        torch.cuda.get_device_name(precision.device)
        if precision.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()}"
    )
    return EngineInfo(
        model=Path(config.model).stem,
        architecture=decoder.spec.architecture,
        device=device,
        backend=decoder.backend.name,
        weight_format=decoder.weight_format,
        kv_format=precision.kv_format.value,
        context_length=plan.context_length,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        weight_bytes=decoder.weight_bytes,
        kv_bytes=plan.kv_bytes,
        workspace_bytes=plan.workspace_bytes,
        memory_bytes=plan.budget_bytes,
        load_seconds=load_seconds,
        fingerprint=_fingerprint(Path(config.model), decoder.weight_format, precision),
    )


def _fingerprint(path: Path, weight_format: str, precision: _Precision) -> str:
    """Changes when the answers to a seeded request may change: weights, formats, version.

    Of each weight file its name, size and outer megabytes count: reading all of a large model
    once more would cost seconds at every start.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{__version__} {weight_format} {precision}".encode())
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(2**20))
            stream.seek(max(0, size - 2**20))
            digest.update(stream.read(2**20))
    return f"fp_{digest.hexdigest()}"
