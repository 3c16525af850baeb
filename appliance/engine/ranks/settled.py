"""Starts a model's ranks, and settles their parts by what they measure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.engine.rank_split.pipeline import faster_stages, pipeline_cost
from appliance.engine.rank_split.work import ModelBytes
from appliance.engine.ranks.division import DividedLayers
from appliance.engine.ranks.stage_division import Stages
from appliance.engine.ranks.started import StartedRanks
from appliance.errors import ConfigError
from appliance.model.shard.column_units import column_units
from appliance.model.shard.shard import shard_model

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    import torch

    from appliance.engine.execution.execution import Precision
    from appliance.engine.rank_split.pipeline import PipelineCost
    from appliance.engine.ranks.ranks import Ranks
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

FLOAT_BYTES = 4  # of a number in an exchange of the CPU library
NO_STAGES = "torch executes no pipeline"


def start_native(
    ranks: Ranks,
    source: ModelSource,
    measure: Callable[[TensorSlot], float],
    kv_bytes_per_token: float,
    precision: Precision,
    library: ctypes.CDLL,
) -> Ranks:
    """Start the other ranks of the CPU library.

    Args:
        ranks: divided by the settings.
        measure: returns the bytes of a tensor as laid out.
        kv_bytes_per_token: of all layers of the whole model.

    Raises:
        EngineError: a rank could not be started, or its link is unsound.
    """
    of_stages = (ranks.config, source, ranks.division.split, precision, library)
    by_memory, why_shares = None, ""
    try:
        by_memory = Stages.of(*of_stages)
    except ConfigError as error:
        why_shares = str(error).partition(";")[0]
    model = _model_bytes(ranks, source, measure, kv_bytes_per_token, FLOAT_BYTES)
    started = StartedRanks.begin(ranks.config.ranks_setting, ranks.threads)
    pipeline = None
    if by_memory is not None:
        pipeline = _pipeline(ranks, model, started, by_memory.bounds)
    if not ranks.division.bounds:
        settled = _with_shares(ranks, source, model, started, pipeline, why_shares)
        assert settled.started is not None
        if not (why_whole := _why_whole(ranks, settled.started)):
            return settled
        started = replace(started, why_whole=why_whole)
    assert pipeline is not None
    division = Stages.of(*of_stages, pipeline.bounds)
    return replace(ranks, division=division, started=replace(started, whole=pipeline))


def start_torch(
    ranks: Ranks,
    source: ModelSource,
    measure: Callable[[TensorSlot], float],
    kv_bytes_per_token: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Ranks:
    """Start the other ranks of the torch decoder; see `start_native`.

    Args:
        device: rank 0's; each other rank gets the next device of its kind.
        dtype: of exchanged numbers.
    """
    config = ranks.config
    model = _model_bytes(ranks, source, measure, kv_bytes_per_token, dtype.itemsize)
    row_bytes = dtype.itemsize * source.spec.hidden_size
    utilization = config.gpu_memory_utilization
    given = (config.ranks_setting, ranks.threads, device, row_bytes, utilization)
    started = StartedRanks.begin_torch(*given)
    return _with_shares(ranks, source, model, started, None, NO_STAGES)


def _model_bytes(
    ranks: Ranks,
    source: ModelSource,
    measure: Callable[[TensorSlot], float],
    kv_bytes_per_token: float,
    given: int,
) -> ModelBytes:
    """Count a model's bytes; `given` is the size of a number in an exchange."""
    spec = source.spec
    context = ranks.config.max_model_len or spec.context_length
    return ModelBytes.of(spec, source.slots(), measure, kv_bytes_per_token, context, given)


def _pipeline(
    ranks: Ranks, model: ModelBytes, started: StartedRanks, by_memory: tuple[int, ...]
) -> PipelineCost:
    """Return the cost of whole layers, divided by the asked shares, or by memory or speed."""
    divide = faster_stages if ranks.config.gpu_split == "auto" else pipeline_cost
    row_bytes = model.spec.hidden_size * model.given
    layers, last = model.layer_costs(), model.vocabulary
    return divide(layers, last, started.facts, started.speed, row_bytes, by_memory)


def _with_shares(
    ranks: Ranks,
    source: ModelSource,
    model: ModelBytes,
    started: StartedRanks,
    pipeline: PipelineCost | None,
    why_shares: str,
) -> Ranks:
    """Settle each rank's share of a layer.

    Args:
        pipeline: cost of whole layers; None if ranks cannot have them.
        why_shares: why they cannot; empty if they can.
    """
    spec, units = source.spec, column_units(source)
    asked = None if ranks.config.gpu_split == "auto" else ranks.division.split
    started = started.planned(
        asked,
        model,
        lambda split: shard_model(spec, split, units),
        pipeline=pipeline,
        why_shares=why_shares,
    )
    assert started.plan is not None
    split = started.plan.split
    division = DividedLayers(split, shard_model(spec, split, units))
    return replace(ranks, division=division, started=started)


def _why_whole(ranks: Ranks, started: StartedRanks) -> str:
    """Return the reason for whole layers; empty if each rank gets a share of every layer."""
    other, link = started.other, started.slowest
    if other is None or other.is_tensor:
        return ""
    if ranks.config.ranks > 1:
        return f"{other}, over {link}"
    if not link.is_slow:
        return ""
    return f"{ranks.config.ranks_setting} needs a faster link than {link}: {other}"
