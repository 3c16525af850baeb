"""Chooses how ranks divide a layer's experts: by columns of each, or by their numbers.

Columns keep ranks equally busy whichever experts a token chooses, so they are taken where they
divide evenly. Numbers cut no weight, but a token may choose more experts of one rank than of
another. Imports no torch.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import factorial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.kernels.routing import Router
    from appliance.model.shard.split import Columns, Split


def choose_experts(
    router: Router, split: Split, columns: Sequence[Columns] | None
) -> list[range] | None:
    """Return the numbers of each rank's experts; None if columns of each expert are better.

    Args:
        columns: of each rank, cut without loss; None if no such cut gives each rank some.
    """
    bounds = split.cut(router.num_experts)
    if bounds is None:
        return None
    experts = [range(first, last) for first, last in pairwise(bounds)]
    if columns is None:
        return experts
    shares = _fractions(split.shares)
    widths = _fractions([last - first for first, last in columns])
    by_columns = max(width / share for width, share in zip(widths, shares, strict=True))
    counts = tuple(map(len, experts))
    return experts if expected_load(router.top_k, counts, split.shares) < by_columns else None


@cache
def expected_load(top_k: int, counts: tuple[int, ...], shares: tuple[int, ...]) -> float:
    """Return the expected load of the busiest rank, in terms of its share; 1 is even.

    A rank's load is its part of the experts that a token chooses, divided by its share. Each expert
    is as likely, and choices do not depend on one another.

    Args:
        counts: of each rank's experts.
        shares: of each rank.
    """
    chances, wanted = _fractions(counts), _fractions(shares)
    loads = sorted({count / (top_k * share) for share in wanted for count in range(top_k + 1)})
    below, expected = 0.0, 0.0
    for load in loads:
        most = [int(load * top_k * share + 1e-9) for share in wanted]
        until = _chance_of_at_most(top_k, chances, most)
        expected += load * (until - below)
        below = until
    return expected


def _chance_of_at_most(top_k: int, chances: Sequence[float], most: Sequence[int]) -> float:
    """Return the probability that no rank has more than `most` of `top_k` choices."""
    ways = [1.0] + [0.0] * top_k  # by the number of choices that the ranks so far have
    for chance, limit in zip(chances, most, strict=True):
        terms = [chance**count / factorial(count) for count in range(min(limit, top_k) + 1)]
        ways = [
            sum(term * ways[total - count] for count, term in enumerate(terms[: total + 1]))
            for total in range(top_k + 1)
        ]
    return factorial(top_k) * ways[top_k]


def _fractions(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]
