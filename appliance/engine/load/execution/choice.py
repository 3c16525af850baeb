"""Chooses the execution: the CPU library, or torch with a backend's kernels."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, cast

from appliance.engine.devices import Processor, choose_device, native_engine
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.load.kv_precision import choose_kv
from appliance.engine.packed_models import PackedModels
from appliance.engine.ranks.ranks import Ranks
from appliance.engine.run.adapters.loader import wants_adapters
from appliance.errors import ConfigError
from appliance.kernels.arrays import numpy_dtype
from appliance.kernels.cpu.library import LibraryError, load_library, select_isa
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.model.native import why_unsupported

if TYPE_CHECKING:
    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.load.execution.torch_execution import TorchExecution
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec

logger = logging.getLogger(__name__)

SCALAR_NOTE = (
    "this CPU has none of the vector instructions that the CPU library is written for (AVX2 or "
    "later): it runs its plain C code, which is many times slower"
)
# The library sums in one order for any batch; torch's products have no fixed order.
TORCH_NOTE = (
    "torch executes the model, not the CPU library: slower, with dense weights, and a seeded "
    "answer may change with what else is in the batch"
)
# Attention and matrices are ours; transformers has the rest.
FALLBACK_NOTE = (
    "transformers' modules execute {}, of which no family here is: slower than a native family, "
    "without adapters, draft models and --ranks"
)
# As `FALLBACK_NOTE`, of classes that mix positions in a way of their own.
OWN_CACHES_NOTE = (
    "transformers' modules execute {}, each sequence with a cache of its own class, one sequence"
    " after the other: many at once are no faster than one, and there are no prefix cache, drafts,"
    " adapters, quantized KV or --ranks. The engine's own cache cannot be had: {}"
)
TRELLIS_NOTE = (
    "no kernel multiplies experts of the trellis format on a GPU yet, so that the CPU executes the "
    "model"
)
_NO_LIMIT_NOTE = (
    "config.json names no longest context: {:,} tokens are allowed; --max-model-len allows less"
)


def choose_execution(
    config: EngineConfig, source: ModelSource, threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """Choose device, element types and the fastest execution available.

    Returns:
        The execution, and notes for the user.

    Raises:
        ConfigError: device or execution do not support a setting.
    """
    precision, kv_notes = choose_precision(config, source)
    execution, notes = execution_for(config, precision, source, threads)
    return execution, (*kv_notes, *notes)


def choose_precision(
    config: EngineConfig, source: ModelSource
) -> tuple[Precision, tuple[str, ...]]:
    """Choose device, activations' dtype and the KV cache's precision, with notes for the user.

    Raises:
        ConfigError: the device does not support a setting.
    """
    notes: tuple[str, ...] = ()
    device = choose_device(config)
    if device.type == "cuda" and source.is_trellis and source.spec.has_experts:
        if config.device == "cuda":
            raise ConfigError(f"--device cuda: {TRELLIS_NOTE}; leave it out, or take --device cpu")
        logger.warning("%s", TRELLIS_NOTE)
        device, notes = Processor(), (TRELLIS_NOTE,)
    precision, kv_notes = _precision_on(config, source, device)
    return precision, (*notes, *kv_notes)


def _precision_on(
    config: EngineConfig, source: ModelSource, device: torch.device | Processor
) -> tuple[Precision, tuple[str, ...]]:
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


def execution_for(
    config: EngineConfig, precision: Precision, source: ModelSource, threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """Choose the fastest execution available for these element types.

    Returns:
        The execution, and notes for the user.

    Raises:
        ConfigError: the execution does not support a setting.
    """
    notes: list[str] = []
    if config.prompt_int8:
        _check_prompt_int8(config, precision, source)
    _check_ranks(config, precision, source)
    ranks = None
    if source.fallback is None:
        ranks = Ranks.of(config, source, precision, threads)
    if source.fallback is not None:
        return _fallback_for(config, precision, source, threads)
    if precision.device.type == "cpu" and config.kernels == "auto":
        reason = why_not_native(config, source)
        if reason is None:
            engine, isa = native_engine(config, threads if ranks is None else ranks.threads[0])
            if isa is Isa.SCALAR and config.cpu_isa == "auto":
                logger.warning("%s", SCALAR_NOTE)
                notes.append(SCALAR_NOTE)
            kept = PackedModels.of(config)
            if kept is not None:
                notes.append(kept.note())
            return NativeExecution(precision, engine, isa.name, ranks, kept), tuple(notes)
        if config.cpu_isa != "auto":
            raise ConfigError(f"--cpu-isa {config.cpu_isa} cannot be had: {reason}")
        logger.warning("%s: %s", TORCH_NOTE, reason)
        notes.append(f"{TORCH_NOTE}: {reason}")
    elif precision.device.type == "cpu":
        notes.append(TORCH_NOTE)
    return _torch_execution(config, precision, source, ranks), tuple(notes)


def _fallback_for(
    config: EngineConfig, precision: Precision, source: ModelSource, threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """Choose the source of linears and attention for transformers' modules."""
    from appliance.engine.load.execution.fallback_execution import FallbackExecution

    assert source.fallback is not None
    if wants_adapters(config):
        raise ConfigError(
            f"{source.fallback.name} is executed by transformers' modules, to which no adapter is "
            "added; leave out --lora and --lora-dir, or merge the adapter into the model"
        )
    own = source.spec.own_cache
    notes = [FALLBACK_NOTE.format(source.fallback.name)]
    if own is not None:
        notes = [OWN_CACHES_NOTE.format(source.fallback.name, own.reason)]
        if not own.has_limit:
            notes.append(_NO_LIMIT_NOTE.format(source.spec.context_length))
    inner: NativeExecution | TorchExecution
    reason = why_no_library(config, source)
    if precision.device.type == "cpu" and config.kernels == "auto" and reason is None:
        engine, isa = native_engine(config, threads)
        inner = NativeExecution(precision, engine, isa.name)
    else:
        without = reason or f"it goes to {precision.device}, with --kernels {config.kernels}"
        if config.cpu_isa != "auto":
            raise ConfigError(f"--cpu-isa {config.cpu_isa} cannot be had: {without}")
        if precision.device.type == "cpu":
            notes.append(f"{TORCH_NOTE}: {without}")
        inner = _torch_execution(config, precision, source)
    return FallbackExecution(inner), tuple(notes)


def _torch_execution(
    config: EngineConfig, precision: Precision, source: ModelSource, ranks: Ranks | None = None
) -> TorchExecution:
    on_pages = not all(layer.format.has_elements for layer in precision.kv_layers)
    if on_pages and precision.block_size != PAGE_TOKENS:
        raise ConfigError(
            f"{precision.kv_format.value} KV blocks hold {PAGE_TOKENS} tokens where torch executes "
            f"the model, not {precision.block_size}; leave --block-size out"
        )
    from appliance.engine.devices import backend_of
    from appliance.engine.load.execution.torch_execution import TorchExecution

    backend = backend_of(config, cast("torch.device", precision.device))
    if backend.name == "triton":
        for spec in [source.spec] if ranks is None else ranks.division.cached(source.spec):
            _check_kernels(spec, precision)
    return TorchExecution(precision, backend, ranks=ranks, rounds_prompts=config.prompt_int8)


def _check_ranks(config: EngineConfig, precision: Precision, source: ModelSource) -> None:
    """Refuse several ranks if only one process can execute the model."""
    size, asked = config.num_ranks, config.ranks_setting
    if size == 1:
        return
    if len(config.ranks_settings) > 1:
        if config.ranks > 1:
            size = max(config.ranks, config.tensor_parallel, config.pipeline_parallel)
        raise ConfigError(
            f"{' and '.join(config.ranks_settings)} exclude one another: a rank has a share of each"
            f" layer or whole layers; use --tensor-parallel {size} or --pipeline-parallel {size},"
            f" or --ranks {size}, which chooses between them"
        )
    setting = asked.split()[0]
    if precision.device.type == "cuda":
        import torch

        count = torch.cuda.device_count()
        if size > count:
            raise ConfigError(
                f"{asked} needs as many GPUs, and PyTorch sees {count}; use"
                f" {setting} 1, or --device cpu"
            )
    if source.fallback is not None:
        raise ConfigError(
            f"{asked} divides models of a family here, and transformers' modules execute"
            f" {source.fallback.name}; use {setting} 1"
        )
    without = _why_torch(config, precision, source)
    if without and config.pipeline_parallel > 1:
        raise ConfigError(f"{asked} needs the CPU library: {without}; use {setting} 1")
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(f"{asked} needs Linux; use {setting} 1")


def _check_prompt_int8(config: EngineConfig, precision: Precision, source: ModelSource) -> None:
    """Refuse prompts in int8 where no kernel multiplies them, or none is computed to be faster."""
    reason = None
    if precision.device.type != "cuda" or config.kernels != "auto":
        reason = "it is for our kernels on a GPU"
    elif config.is_divided:
        reason = "it is for a model on one GPU"
    elif source.fallback is not None:
        reason = f"transformers' modules execute {source.fallback.name}"
    elif precision.dtype.itemsize != 2:
        reason = f"its activations have 16 bits, not {precision.dtype}"
    else:
        from appliance.kernels.gpu.target import target_of
        from appliance.kernels.int8_matmul.tiles import has_fast_int8

        capability = target_of(cast("torch.device", precision.device)).capability
        if not has_fast_int8(capability):
            reason = (
                "it pays on GeForce RTX 30, 40 and 50 (compute capability 8.6, 8.9, 12.0), not on"
                f" {capability // 10}.{capability % 10}"
            )
    if reason is not None:
        raise ConfigError(f"--prompt-int8 cannot be had: {reason}; leave it out")


def _why_torch(config: EngineConfig, precision: Precision, source: ModelSource) -> str | None:
    """Say why torch executes the ranks; None if the CPU library does."""
    if precision.device.type == "cuda":
        return "the model goes to GPUs"
    if config.kernels != "auto":
        return f"--kernels {config.kernels} does without"
    return why_not_native(config, source)


def why_not_native(config: EngineConfig, source: ModelSource) -> str | None:
    """Return why the CPU library cannot execute a model here; None if it can."""
    if source.fallback is not None:
        return f"transformers executes {source.fallback.name}, of which no family here is"
    return why_no_library(config, source)


def why_no_library(config: EngineConfig, source: ModelSource) -> str | None:
    """Return why the CPU library cannot hold a model's weights and cache; None if it can."""
    if config.block_size is not None and config.block_size % 16:
        return f"its blocks hold a multiple of 16 tokens, not {config.block_size}"
    try:
        select_isa(load_library(), config.cpu_isa)
    except LibraryError as error:
        return str(error)
    return why_unsupported(source)


def _check_kernels(spec: DecoderSpec, precision: Precision) -> None:
    from appliance.kernels.attention.launch import check_supported
    from appliance.kernels.latent_attention.launch import check_latents
    from appliance.kernels.norm_rope.launch import check_supported as check_norm
    from appliance.kernels.sampling.launch import check_vocabulary

    check_norm(spec.hidden_size, precision.dtype)
    check_vocabulary(spec.vocab_size)
    formats, places = precision.kv_layers, spec.cache_places
    for index, attention in spec.attention_layers.items():
        check_supported(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            precision.block_size,
            precision.dtype,
            formats[places[index]].format,
            layer=index,
        )
    for index, mixer in spec.latent_layers.items():
        check_latents(
            mixer.latent,
            mixer.rope_dim,
            precision.block_size,
            precision.dtype,
            formats[places[index]].format,
            layer=index,
        )
