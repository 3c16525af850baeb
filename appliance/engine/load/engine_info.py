"""Describes a loaded engine to clients: settings, sizes, fingerprint, notes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance.engine.devices import device_name
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.served_model import fingerprint_of
from appliance.kernels.arrays import dtype_name
from appliance.kernels.cache.state_format import StateFormat
from appliance.model_files.files_beside import find_projector

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.load.memory_request import ModelMemory
    from appliance.engine.load.runner import RunnerParts
    from appliance.engine.memory.plan import MemoryPlan
    from appliance.engine.run.device import Device
    from appliance.model.source import ModelSource


def describe(
    config: EngineConfig,
    source: ModelSource,
    parts: RunnerParts,
    memory: ModelMemory,
    eos_token_ids: tuple[int, ...],
    threads: int,
) -> EngineInfo:
    """Build the description; the caller adds times, drafts and the process's own memory.

    Args:
        parts: with a cache that is allocated by the plan of `memory`.
    """
    notes = _notes(source, parts, memory)
    execution, executor, plan = parts.execution, parts.executor, memory.plan
    precision, kv_format = execution.precision, memory.request.kv_format
    weight_format, router = executor.weight_format, source.spec.router
    # What was made in one form of states is never read as another: answers and files differ.
    kept = source.spec.state_format if plan.states.num_bytes else StateFormat.FP32
    arithmetic = (
        f"{weight_format} {execution.name} {precision.device} {dtype_name(precision.dtype)} "
        f"{kv_format} {precision.block_size}"
        f"{'' if kept is StateFormat.FP32 else f' states {kept.value}'}"
    )
    reads_pictures = memory.request.picture_bytes > 0
    projector = find_projector(source.path, config.mmproj) if reads_pictures else None
    return EngineInfo(
        model=Path(config.model).stem,
        architecture=source.spec.architecture,
        device=device_name(precision.device, threads),
        backend=execution.name,
        weight_format=weight_format,
        kv_format=kv_format,
        context_length=plan.context_length,
        vocab_size=source.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        weight_bytes=executor.weight_bytes,
        kv_bytes=plan.kv_bytes,
        workspace_bytes=plan.workspace_bytes,
        memory_bytes=plan.budget_bytes,
        load_seconds=0.0,
        fingerprint=fingerprint_of(Path(config.model), arithmetic, projector),
        # As `BlockManager` writes them: 1 is a block with an open block.
        precisions=(kv_format, *(["int8 while open"] if parts.num_open else [])),
        kv_host_bytes=plan.kv_host_bytes,
        kv_host_is_pinned=parts.device.is_asynchronous and parts.ranked is None,
        state_bytes=plan.states.num_bytes,
        state_format=kept.value,
        adapter_bytes=plan.adapter_bytes,
        num_checkpoints=plan.states.num_checkpoints,
        num_parameters=source.num_parameters(),
        hidden_size=source.spec.hidden_size,
        projector="" if projector is None else str(projector),
        num_experts=0 if router is None else router.num_experts,
        experts_per_token=0 if router is None else router.top_k,
        draft_bytes=memory.request.draft_bytes,
        reads_pictures=reads_pictures,
        picture_bytes=memory.request.picture_bytes,
        ranks=() if parts.ranked is None else parts.ranked.ranks(),
        notes=notes,
    )


def _notes(source: ModelSource, parts: RunnerParts, memory: ModelMemory) -> tuple[str, ...]:
    """Return notes for the user on ranks, weights, a GPU's missing kernels and memory."""
    ranks, own_cache = parts.execution.ranks, source.spec.own_cache
    notes = () if ranks is None else ranks.notes()
    if parts.ranked is not None or own_cache is not None:
        notes += cast("Any", parts.executor).notes()
    notes += (*source.notes, *source.weights.notes())
    on_host = bool(memory.plan.host_experts.layers)
    if on_host:
        notes += (_split_note(source, parts.device, memory),)
    is_enqueued = parts.executor.is_enqueued or on_host
    notes += _torch_notes(source, parts.device, is_enqueued=is_enqueued)
    return notes + _host_notes(memory.plan)


def _split_note(source: ModelSource, device: Device, memory: ModelMemory) -> str:
    from appliance.engine.memory.experts.prediction import split_in_words

    name = device_name(device.torch_device, 1)
    return split_in_words(source, memory.plan, memory.request.kv_bytes_per_token, name)


def _torch_notes(source: ModelSource, device: Device, *, is_enqueued: bool) -> tuple[str, ...]:
    """Note operations that run on a GPU without their own kernel.

    Args:
        is_enqueued: no layer waits to learn which experts it needs.
    """
    if not device.is_asynchronous or device.torch_device.type != "cuda":
        return ()
    if not source.spec.has_experts or is_enqueued:
        return ()
    return ("experts run one after another on the GPU, without graphs: slower than can be",)


def _host_notes(plan: MemoryPlan) -> tuple[str, ...]:
    """Note a small host memory for evicted blocks."""
    if not plan.host_is_short:
        return ()
    return (
        f"only {plan.kv_host_bytes / 2**20:,.0f} MiB of host memory are left for sequences that"
        " have to make room: long ones are computed again; --kv-host-memory says how much,"
        " --kv-cache-memory or --max-model-len leave more",
    )
