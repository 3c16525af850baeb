"""Chooses the shares that fit and predict the fastest token. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

from appliance.engine.memory_refusal import as_size
from appliance.engine.rank_split.pipeline import LEAST_GAIN
from appliance.engine.rank_split.prediction import predict
from appliance.engine.rank_split.work import token_work
from appliance.errors import MemoryPlanError
from appliance.model.shard.split import MOST_NAMED, Split, distance, valid_splits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.engine.links.link import LinkSpeed
    from appliance.engine.rank_split.pipeline import RankFacts
    from appliance.engine.rank_split.prediction import TokenPrediction
    from appliance.engine.rank_split.work import ModelBytes, TokenWork
    from appliance.model.shard.shard import Shard

MOST_UNITS = 16  # into which a choice divides a model
MOST_PLANNED = 64  # for a message


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Shares, and their predicted costs."""

    split: Split
    work: TokenWork
    prediction: TokenPrediction

    def fits(self, ranks: Sequence[RankFacts]) -> bool:
        """Return True if each rank holds its part."""
        return all(rank.holds(held) for rank, held in zip(ranks, self.work.holds, strict=True))

    def __str__(self) -> str:
        return f"{self.split} ({1e3 * self.prediction.seconds:,.2f} ms a token)"


def choose_split(
    asked: Split | None,
    model: ModelBytes,
    shards_of: Callable[[Split], tuple[Shard, ...]],
    ranks: Sequence[RankFacts],
    link: LinkSpeed,
) -> SplitPlan:
    """Return the requested shares if they fit, or the fastest predicted ones that fit.

    Args:
        asked: None chooses; even shares unless others gain at least `LEAST_GAIN`.
        shards_of: divides the model.

    Raises:
        ConfigError: the heads do not divide by the asked shares.
        MemoryPlanError: a part does not fit its rank.
    """

    def planned(split: Split) -> SplitPlan:
        work = token_work(model, shards_of(split))
        return SplitPlan(split, work, predict(work, ranks, link))

    if asked is not None and (own := planned(asked)).fits(ranks):
        return own
    plans = [planned(split) for split in candidates(ranks)]
    fitting = [plan for plan in plans if plan.fits(ranks)]
    if asked is not None:
        # Other than what is chosen, what is asked for must divide the heads.
        exact = valid_splits(model.spec, asked) or [plan.split for plan in fitting]
        exact.sort(key=lambda split: distance(split, asked))
        nearest = [plan for plan in map(planned, exact[:MOST_PLANNED]) if plan.fits(ranks)]
        raise MemoryPlanError(_refusal(own, ranks, nearest))
    if not fitting:
        raise MemoryPlanError(_refusal(min(plans, key=_seconds), ranks, ()))
    fastest = min(fitting, key=_seconds)
    even = plans[0]
    is_clear = _seconds(fastest) < (1 - LEAST_GAIN) * _seconds(even)
    return fastest if is_clear or even not in fitting else even


def candidates(ranks: Sequence[RankFacts]) -> list[Split]:
    """List even shares, then shares by the ranks' bandwidth, then by their memory."""
    size = len(ranks)
    found = [(1,) * size]
    scales = [[rank.bytes_per_second for rank in ranks]]
    memory = [rank.memory_bytes for rank in ranks]
    if None not in memory:
        scales.append([float(num_bytes or 1) for num_bytes in memory])
    for scale in scales:
        wanted = Split(tuple(max(1, round(1000 * one / max(scale))) for one in scale))
        for units in range(size, max(MOST_UNITS, 2 * size) + 1):
            bounds = wanted.cut(units)
            assert bounds is not None
            found.append(tuple(last - first for first, last in pairwise(bounds)))
    lowest = (tuple(count // gcd(*counts) for count in counts) for counts in found)
    return [Split(shares) for shares in dict.fromkeys(lowest)]


def _seconds(plan: SplitPlan) -> float:
    return plan.prediction.seconds


def _refusal(plan: SplitPlan, ranks: Sequence[RankFacts], nearest: Sequence[SplitPlan]) -> str:
    each = zip(ranks, plan.work.holds, strict=True)
    lacking = ", ".join(
        f"rank {place} needs {as_size(round(held))} of {as_size(rank.memory_bytes or 0)}"
        for place, (rank, held) in enumerate(each)
        if not rank.holds(held)
    )
    advice = (
        f"the nearest that fit: {', '.join(map(str, nearest[:MOST_NAMED]))}"
        if nearest
        else "no others fit either; take a smaller or more quantized model, or --max-model-len"
    )
    return f"--gpu-split {plan.split} does not fit: {lacking}; {advice}"
