"""Starts a model's ranks, measures them, and settles their parts by what was measured."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.engine.ranks.division import DividedLayers
from appliance.engine.ranks.pipeline import Stages
from appliance.engine.ranks.probes import copy_rates, try_links
from appliance.engine.ranks.rank_group import RankGroup
from appliance.engine.ranks.shares import HeldBytes, RankFacts, choose_split
from appliance.errors import ConfigError, EngineError
from appliance.model.shard.shard import column_units, shard_model
from appliance.model.shard.stage import check_stages

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    import torch

    from appliance.engine.devices import Precision
    from appliance.engine.ranks.link import LinkTrial
    from appliance.engine.ranks.ranks import Ranks
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Processes that wait for their part of the model.

    Attributes:
        group: the other ranks.
        links: to each of them.
        facts: of all ranks.
        reason: why the links do not take the usually fastest path; empty if they do.
        why_shares: why there cannot be a pipeline; empty if there can.
        why_whole: why ranks have whole layers although shares are possible; empty otherwise.
    """

    group: RankGroup
    links: tuple[LinkTrial, ...]
    facts: tuple[RankFacts, ...]
    reason: str = ""
    why_shares: str = ""
    why_whole: str = ""

    @classmethod
    def begin(cls, setting: str, threads: Sequence[int]) -> StartedRanks:
        """Start the other processes, test their links, and measure the memory of all ranks.

        Args:
            setting: the one that requests ranks, with its value.
            threads: of each rank.

        Raises:
            EngineError: a rank could not be started, or its link is unsound.
        """
        group = RankGroup(setting, len(threads))
        try:
            links = try_links(group)
            for rank, trial in enumerate(links, start=1):
                if trial.problem:
                    raise EngineError(
                        f"the link to rank {rank} may not be used: {trial}; nothing else joins"
                        f" ranks of the CPU library: start again, leave out {setting}, or give"
                        " --tensor-parallel with --kernels torch, whose ranks meet by sockets"
                    )
            facts = tuple(map(RankFacts, copy_rates(group, threads)))
        except BaseException:
            group.close()
            raise
        return cls(group, links, facts)._logged()

    @classmethod
    def begin_torch(
        cls,
        setting: str,
        threads: Sequence[int],
        device: torch.device,
        row_bytes: float,
        gpu_utilization: float,
    ) -> StartedRanks:
        """Start the other processes of ranks that torch executes; see `begin`.

        Args:
            device: rank 0's; each other rank gets the next device of its kind.
            row_bytes: what a rank sends per token in an exchange.
            gpu_utilization: limit of a rank's share of GPU memory.

        Raises:
            EngineError: a rank could not be started, or no link is sound.
        """
        from appliance.engine.ranks.torch_probes import gpu_facts, start_tested

        group, links, reason = start_tested(setting, len(threads), device.type, row_bytes)
        try:
            if device.type == "cpu":
                facts = tuple(map(RankFacts, copy_rates(group, threads)))
            else:
                facts = gpu_facts(group, device, gpu_utilization)
        except BaseException:
            group.close()
            raise
        return cls(group, links, facts, reason)._logged()

    def _logged(self) -> StartedRanks:
        for rank, trial in enumerate(self.links, start=1):
            logger.info("link to rank %d: %s", rank, trial)
        if self.reason:
            logger.warning("ranks meet %s: %s", self.links[0].path.value, self.reason)
        return self

    @property
    def rates(self) -> tuple[float, ...]:
        """Copy bandwidth of each rank, bytes per second."""
        return tuple(one.bytes_per_second for one in self.facts)

    def notes(self) -> tuple[str, ...]:
        """Describe the measurements, and why ranks have whole layers."""
        rates = ", ".join(f"{rate / 1e9:,.1f}" for rate in self.rates)
        measured = f"ranks copy {rates} GB/s, {self.slowest}"
        measured += f", since {self.reason}" if self.reason else ""
        if self.why_whole:
            return (measured, f"each rank has whole layers, since {self.why_whole}")
        return (measured,)

    @property
    def slowest(self) -> LinkTrial:
        return max(self.links, key=lambda trial: trial.time_of())


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
    split = ranks.division.split
    division = Stages.of(config, source, split, precision, library, rates)
    return replace(ranks, division=division, started=started)


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
    started = StartedRanks.begin_torch(
        config.ranks_setting, ranks.threads, device, row_bytes, config.gpu_memory_utilization
    )
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
