"""Compares tensor and pipeline parallelism by arithmetic alone: no model, device or torch.

Tensor parallel: all ranks read their part of each layer at the same time, and wait for each other
after each section. Pipeline parallel: each rank has whole layers, and a token passes one rank after
another. While memory is what limits both, several streams change neither: each step reads the
weights once, and a pipeline reads its part once for each group of streams that follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from appliance.model.shard.stage import cut_layers, run_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.links.link import LinkSpeed

# What is not the usual must be faster by this much: a few percent are noise of a measurement, and
# would change from start to start, and with them the last bits of seeded answers.
LEAST_GAIN = 0.10


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's memory.

    Attributes:
        bytes_per_second: read bandwidth.
        memory_bytes: limit of its part; None if the ranks share one memory.
    """

    bytes_per_second: float
    memory_bytes: int | None = None

    def holds(self, num_bytes: float) -> bool:
        """Return True if this many bytes fit."""
        return self.memory_bytes is None or num_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes of one layer: read per token, and held."""

    reads: float
    holds: float


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """The cost of a token in a pipeline.

    Attributes:
        bounds: (size + 1,) first layer of each rank, then the number of layers.
        stages: (size,) seconds that each rank reads.
        exchanges: seconds between ranks.
    """

    bounds: tuple[int, ...]
    stages: tuple[float, ...]
    exchanges: float

    @property
    def seconds(self) -> float:
        """Seconds per token of one stream."""
        return sum(self.stages) + self.exchanges

    @property
    def busy(self) -> tuple[float, ...]:
        """The share of a token's time during which each rank reads."""
        return tuple(own / self.seconds for own in self.stages)


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    """The faster of two ways to divide a model.

    Attributes:
        tensor_seconds: per token with divided layers.
        pipeline: cost with whole layers.
    """

    tensor_seconds: float
    pipeline: PipelineCost

    @property
    def is_tensor(self) -> bool:
        """True if dividing each layer is predicted to be at least about as fast."""
        return self.pipeline.seconds > (1 - LEAST_GAIN) * self.tensor_seconds

    def __str__(self) -> str:
        counts = [str(last - first) for first, last in pairwise(self.pipeline.bounds)]
        tensor = f"tensor parallel {1e3 * self.tensor_seconds:,.2f} ms a token"
        pipeline = f"pipeline parallel {1e3 * self.pipeline.seconds:,.2f} ms a token"
        pipeline += f" ({', '.join(counts)} layers)"
        return f"{tensor}, {pipeline}" if self.is_tensor else f"{pipeline}, {tensor}"


def faster_stages(
    layers: Sequence[LayerCost],
    last: LayerCost,
    ranks: Sequence[RankFacts],
    link: LinkSpeed,
    row_bytes: float,
    by_memory: tuple[int, ...],
) -> PipelineCost:
    """Return the cost of layers divided by speed, or by memory if speed gains too little.

    By speed the slowest rank takes as little time as can be; it must take less by `LEAST_GAIN`.
    Arguments as for `pipeline_cost`.
    """
    reads, rates = [layer.reads for layer in layers], [rank.bytes_per_second for rank in ranks]
    usual, other = (
        pipeline_cost(layers, last, ranks, link, row_bytes, bounds)
        for bounds in (by_memory, cut_layers(reads, rates, last=last.reads))
    )
    return other if max(other.stages) < (1 - LEAST_GAIN) * max(usual.stages) else usual


def pipeline_cost(
    layers: Sequence[LayerCost],
    last: LayerCost,
    ranks: Sequence[RankFacts],
    link: LinkSpeed,
    row_bytes: float,
    bounds: tuple[int, ...],
) -> PipelineCost:
    """Return the cost of a token in a pipeline.

    Args:
        layers: in order.
        last: the head, on the last rank.
        ranks: in the order in which a token passes them.
        link: between two neighbours, and from the last rank back to the first.
        row_bytes: of one token's hidden state.
        bounds: (size + 1,) of the ranks' layers.
    """
    own = run_bytes([layer.reads for layer in layers], bounds, last=last.reads)
    stages = tuple(read / rank.bytes_per_second for read, rank in zip(own, ranks, strict=True))
    # The token goes back to the first rank in a few bytes.
    between = (len(ranks) - 1) * link.time_of(row_bytes) + link.seconds
    return PipelineCost(bounds, stages, between)
