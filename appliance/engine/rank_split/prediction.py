"""Predicts the time of a token on ranks with different memory and one link. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.links.link import LinkSpeed
    from appliance.engine.rank_split.pipeline import RankFacts
    from appliance.engine.rank_split.work import TokenWork


@dataclass(frozen=True, slots=True)
class TokenPrediction:
    """Seconds per token of one stream, limited by memory and link.

    Attributes:
        seconds: of the whole step.
        exchanges: the part spent between ranks.
        busy: (size,) share of the step during which each rank reads.
    """

    seconds: float
    exchanges: float
    busy: tuple[float, ...]


def predict(work: TokenWork, ranks: Sequence[RankFacts], link: LinkSpeed) -> TokenPrediction:
    """Add up the step's description, each section's slowest rank, and the exchanges.

    All ranks send at the same time, each to one rank after another.
    """
    size = len(ranks)
    reading, exchanges = 0.0, link.seconds
    own, since = [0.0] * size, [0.0] * size  # seconds in all, and since the last exchange
    for section in work.sections:
        for rank, (num_bytes, facts) in enumerate(zip(section.reads, ranks, strict=True)):
            since[rank] += num_bytes / facts.bytes_per_second
        if section.gives:
            reading += max(since)
            own = [before + now for before, now in zip(own, since, strict=True)]
            since = [0.0] * size
            exchanges += link.time_of((size - 1) * section.gives)
    seconds = reading + exchanges
    return TokenPrediction(seconds, exchanges, tuple(one / seconds for one in own))
