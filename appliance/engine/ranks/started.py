"""The other ranks' processes before they load anything, and what was measured of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.ranks.probes import copy_rates, try_links
from appliance.engine.ranks.rank_group import RankGroup
from appliance.engine.ranks.shares import RankFacts
from appliance.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from appliance.engine.ranks.links.link import LinkTrial

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
