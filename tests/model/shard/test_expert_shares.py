"""Ranks divide experts by columns if that is even, else by number if that is more even."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from appliance.kernels.routing import Router
from appliance.model.shard.shard import choose_experts, expected_load
from appliance.model.shard.split import Split


def test_even_columns_are_preferred() -> None:
    assert choose_experts(Router(128, 8), Split((1, 1)), [(0, 384), (384, 768)]) is None


def test_without_columns_each_rank_has_some_experts() -> None:
    assert choose_experts(Router(8, 2), Split((2, 1)), None) == [range(5), range(5, 8)]
    assert choose_experts(Router(6, 2), Split((2, 1)), None) == [range(4), range(4, 6)]


def test_fewer_experts_than_ranks_are_not_divided_by_number() -> None:
    assert choose_experts(Router(2, 1), Split((1, 1, 1)), None) is None


def test_blocks_that_divide_less_evenly_than_choices_are_not_cut() -> None:
    """With three blocks of 256 columns, one of two ranks would read two thirds of each expert."""
    columns = [(0, 512), (512, 768)]
    assert choose_experts(Router(128, 8), Split((1, 1)), columns) == [range(64), range(64, 128)]
    assert choose_experts(Router(128, 8), Split((2, 1)), columns) is None
    assert choose_experts(Router(128, 1), Split((1, 1)), columns) is None, "one rank would wait"


@pytest.mark.parametrize(
    ("top_k", "counts", "shares"),
    [(1, (4, 4), (1, 1)), (3, (4, 2), (2, 1)), (4, (3, 3, 2), (1,) * 3)],
)
def test_the_expected_load_is_that_of_all_choices(
    top_k: int, counts: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    total, expected = sum(shares), 0.0
    for choice in product(range(len(counts)), repeat=top_k):
        chance = prod(counts[rank] / sum(counts) for rank in choice)
        loads = [choice.count(rank) * total / (top_k * share) for rank, share in enumerate(shares)]
        expected += chance * max(loads)
    assert expected_load(top_k, counts, shares) == pytest.approx(expected)
