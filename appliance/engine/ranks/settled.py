"""Starts a model's ranks, and settles their parts by what they measure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.engine.ranks.division import DividedLayers
from appliance.engine.ranks.shares import HeldBytes, choose_split
from appliance.engine.ranks.stage_division import Stages
from appliance.engine.ranks.started import StartedRanks
from appliance.errors import ConfigError
from appliance.model.shard.shard import column_units, shard_model
from appliance.model.shard.stage import check_stages

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    import torch

    from appliance.engine.devices import Precision
    from appliance.engine.ranks.ranks import Ranks
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


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
    config, held = ranks.config, _held_bytes(ranks, source, measure, kv_bytes_per_token)
    of_stages = (config, source, ranks.division.split, precision, library)
    why_shares = ""
    try:
        check_stages(source.spec, ranks.size)
    except ConfigError as error:
        why_shares = str(error).partition(";")[0]
    started = StartedRanks.begin(config.ranks_setting, ranks.threads)
    started = replace(started, why_shares=why_shares)
    if not ranks.division.bounds:
        if why_shares or not started.slowest.is_slow:
            return _with_shares(ranks, source, held, started)
        why_whole = f"{config.ranks_setting} needs a faster link than {started.slowest}"
        started = replace(started, why_whole=why_whole)
    rates = started.rates if config.gpu_split == "auto" else ()
    return replace(ranks, division=Stages.of(*of_stages, rates), started=started)


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
    held = _held_bytes(ranks, source, measure, kv_bytes_per_token)
    row_bytes = dtype.itemsize * source.spec.hidden_size
    utilization = config.gpu_memory_utilization
    given = (config.ranks_setting, ranks.threads, device, row_bytes, utilization)
    started = StartedRanks.begin_torch(*given)
    started = replace(started, why_shares="torch executes no pipeline")
    return _with_shares(ranks, source, held, started)


def _held_bytes(
    ranks: Ranks,
    source: ModelSource,
    measure: Callable[[TensorSlot], float],
    kv_bytes_per_token: float,
) -> HeldBytes:
    context = ranks.config.max_model_len or source.spec.context_length
    each = kv_bytes_per_token * context / max(len(source.spec.cache_layers), 1)
    return HeldBytes(tuple((slot, measure(slot)) for slot in source.slots()), each)


def _with_shares(
    ranks: Ranks, source: ModelSource, held: HeldBytes, started: StartedRanks
) -> Ranks:
    """Settle each rank's share of a layer."""
    spec, units = source.spec, column_units(source)
    asked = None if ranks.config.gpu_split == "auto" else ranks.division.split
    try:
        split = choose_split(
            asked, spec, lambda split: held.of(shard_model(spec, split, units)), started.facts
        )
    except BaseException:
        started.group.close()
        raise
    division = DividedLayers(split, shard_model(spec, split, units))
    return replace(ranks, division=division, started=started)
