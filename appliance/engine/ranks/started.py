"""The processes of other ranks before they load anything, measured, and the plan for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.engine.rank_split.choice import choose_split, compare
from appliance.engine.rank_split.pipeline import RankFacts
from appliance.engine.ranks.probes import copy_rates, try_links
from appliance.engine.ranks.rank_group import RankGroup
from appliance.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.engine.links.link import LinkSpeed, LinkTrial
    from appliance.engine.rank_split.choice import SplitPlan
    from appliance.engine.rank_split.pipeline import ParallelChoice
    from appliance.engine.rank_split.work import ModelBytes
    from appliance.model.shard.shard import Shard
    from appliance.model.shard.split import Split

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Processes that wait for their part of the model.

    Attributes:
        group: the other ranks.
        links: to each of them.
        facts: of all ranks.
        plan: what a split of each layer is predicted to cost; None for whole layers.
        other: the same beside a pipeline; None if there cannot be one.
    """

    group: RankGroup
    links: tuple[LinkTrial, ...]
    facts: tuple[RankFacts, ...]
    plan: SplitPlan | None = None
    other: ParallelChoice | None = None

    @classmethod
    def begin(cls, setting: str, threads: Sequence[int]) -> StartedRanks:
        """Start the other processes, test their links, and measure the memory of all ranks.

        Args:
            setting: asks for them, with its value.
            threads: of each rank.

        Raises:
            EngineError: a rank could not be started, or its link may not be used.
        """
        group = RankGroup(setting, len(threads))
        try:
            links = try_links(group)
            for rank, trial in enumerate(links, start=1):
                if trial.problem:
                    raise EngineError(
                        f"the link to rank {rank} may not be used: {trial}; nothing else joins"
                        f" ranks on a CPU: start again, or leave out {setting}"
                    )
            facts = tuple(map(RankFacts, copy_rates(group, threads)))
        except BaseException:
            group.close()
            raise
        for rank, trial in enumerate(links, start=1):
            logger.info("link to rank %d: %s", rank, trial)
        return cls(group, links, facts)

    def planned(
        self,
        asked: Split | None,
        model: ModelBytes,
        shards_of: Callable[[Split], tuple[Shard, ...]],
    ) -> StartedRanks:
        """Settle the shares; arguments and errors as for `choose_split`."""
        try:
            plan = choose_split(asked, model, shards_of, self.facts, self._link)
            other = compare(plan, model, self.facts, self._link)
        except BaseException:
            self.group.close()
            raise
        return replace(self, plan=plan, other=other)

    @property
    def rates(self) -> tuple[float, ...]:
        """Bytes per second that each rank copied."""
        return tuple(one.bytes_per_second for one in self.facts)

    def notes(self) -> tuple[str, ...]:
        """Say what was measured, and what a token is predicted to take, also in a pipeline."""
        rates = ", ".join(f"{rate / 1e9:,.1f}" for rate in self.rates)
        measured = f"ranks copy {rates} GB/s, shared memory {self._link}"
        if self.plan is None:
            return (measured,)
        found = self.plan.prediction
        words = (
            f"{1e3 * found.seconds:,.2f} ms a token predicted at half of the context, of which"
            f" {1e3 * found.exchanges:,.2f} ms between ranks, as far as memory limits it:"
            f" {measured}"
        )
        if self.other is None:
            return (words,)
        than = "no faster" if self.other.is_tensor else "faster"
        return (words, f"over this link a pipeline is predicted to be {than}: {self.other}")

    @property
    def _link(self) -> LinkSpeed:
        """The slowest link."""
        speeds = (trial.speed for trial in self.links if trial.speed is not None)
        return max(speeds, key=lambda speed: speed.seconds)
