"""Chooses each rank's share of a layer by its free memory and measured bandwidth.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import TYPE_CHECKING

from appliance.errors import MemoryPlanError
from appliance.model.recurrent_spec import RecurrentSpec
from appliance.model.shard.shard import kept_portion, portion
from appliance.model.shard.split import MOST_NAMED, Split, distance, valid_splits
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.model.shard.shard import Shard
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot

# What is not the usual must be faster by this much: a few percent are noise of a measurement, and
# would change from start to start, and with them the last bits of seeded answers.
LEAST_GAIN = 0.10
UNITS = 16  # into which a choice divides a model
MOST_PLANNED = 64  # for a message


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's memory.

    Attributes:
        bytes_per_second: copy bandwidth.
        memory_bytes: limit of its part; None if the ranks share one memory.
    """

    bytes_per_second: float
    memory_bytes: int | None = None

    def holds(self, num_bytes: float) -> bool:
        """Return True if this many bytes fit."""
        return self.memory_bytes is None or num_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The bytes of a model that ranks divide.

    Attributes:
        tensors: each with its bytes as laid out.
        kv_bytes: keys and values of one whole context, in each layer that has them.
    """

    tensors: tuple[tuple[TensorSlot, float], ...]
    kv_bytes: float

    def of(self, shards: Sequence[Shard]) -> tuple[float, ...]:
        """Return each rank's bytes of weights, and of one sequence's cache and states."""
        return tuple(
            sum(num_bytes * portion(shard, slot) for slot, num_bytes in self.tensors)
            + sum(self._cached(shard, index) for index in range(len(shard.shares)))
            for shard in shards
        )

    def _cached(self, shard: Shard, index: int) -> float:
        """Return the bytes of a sequence's state, or keys and values, in one layer of a rank."""
        own, heads = shard.spec.layers[index].mixer, shard.shares[index].heads
        if isinstance(own, RecurrentSpec):
            return 4.0 * sum(map(prod, own.state))
        mixer = shard.whole.cache_layers.get(index)
        if mixer is None:
            return 0.0
        return self.kv_bytes * (1.0 if heads is None else kept_portion(mixer, heads))


def choose_split(
    asked: Split | None,
    spec: DecoderSpec,
    held_by: Callable[[Split], tuple[float, ...]],
    ranks: Sequence[RankFacts],
) -> Split:
    """Return the asked shares if they fit, or those whose slowest rank is the fastest.

    A rank's time is that of copying all that it holds.

    Args:
        asked: None chooses; even shares unless others gain at least `LEAST_GAIN`.
        held_by: returns the bytes of each rank.

    Raises:
        ConfigError: the heads do not divide by the asked shares.
        MemoryPlanError: a part does not fit its rank.
    """

    def fits(held: tuple[float, ...]) -> bool:
        return all(rank.holds(num_bytes) for rank, num_bytes in zip(ranks, held, strict=True))

    def seconds(split: Split) -> float:
        return max(
            num_bytes / rank.bytes_per_second
            for rank, num_bytes in zip(ranks, held[split], strict=True)
        )

    if asked is not None and fits(of_asked := held_by(asked)):
        return asked
    held = {split: held_by(split) for split in candidates(ranks)}
    fitting = [split for split in held if fits(held[split])]
    if asked is not None:
        # Other than what is chosen, what is asked for must divide the heads.
        exact = valid_splits(spec, asked) or fitting
        exact.sort(key=lambda split: distance(split, asked))
        nearest = [split for split in exact[:MOST_PLANNED] if fits(held_by(split))]
        raise MemoryPlanError(_refusal(asked, of_asked, ranks, nearest))
    if not fitting:
        best = min(held, key=seconds)
        raise MemoryPlanError(_refusal(best, held[best], ranks, ()))
    even, fastest = next(iter(held)), min(fitting, key=seconds)
    is_clear = seconds(fastest) < (1 - LEAST_GAIN) * seconds(even)
    return fastest if is_clear or even not in fitting else even


def candidates(ranks: Sequence[RankFacts]) -> list[Split]:
    """List even shares, then shares by the ranks' bandwidth, then by their memory."""
    found = [(1,) * len(ranks)]
    scales = [[rank.bytes_per_second for rank in ranks]]
    memory = [rank.memory_bytes for rank in ranks]
    if None not in memory:
        scales.append([float(num_bytes or 1) for num_bytes in memory])
    for scale in scales:
        wanted = Split(tuple(max(1, round(1000 * one / max(scale))) for one in scale))
        bounds = wanted.cut(max(UNITS, 2 * len(ranks)))
        assert bounds is not None
        found.append(tuple(last - first for first, last in pairwise(bounds)))
    lowest = (tuple(count // gcd(*counts) for count in counts) for counts in found)
    return [Split(shares) for shares in dict.fromkeys(lowest)]


def _refusal(
    split: Split, held: tuple[float, ...], ranks: Sequence[RankFacts], nearest: Sequence[Split]
) -> str:
    lacking = ", ".join(
        f"rank {place} needs {as_size(round(num_bytes))} of {as_size(rank.memory_bytes or 0)}"
        for place, (rank, num_bytes) in enumerate(zip(ranks, held, strict=True))
        if not rank.holds(num_bytes)
    )
    advice = (
        f"the nearest that fit: {', '.join(map(str, nearest[:MOST_NAMED]))}"
        if nearest
        else "no others fit either; take a smaller or more quantized model, or --max-model-len"
    )
    return f"--gpu-split {split} does not fit: {lacking}; {advice}"
