"""Shares follow memory and bandwidth; those that do not fit are refused by name."""

from __future__ import annotations

from math import prod

import pytest
from support.models.rank_models import DENSE, shards_of

from appliance.engine.ranks.shares import HeldBytes, RankFacts, candidates, choose_split
from appliance.errors import MemoryPlanError
from appliance.model.names import TensorNames
from appliance.model.shard.split import Split
from appliance.model.tensors import tensor_slots

GIB = 2**30
WEIGHT_BYTES = 0.625  # bytes of a weight: 4 bits and scales
KV_BYTES = 2 * 8 * 128 * 8192  # of a layer: a context of 8,192 tokens in 8 bits
MODEL = HeldBytes(
    tuple((slot, WEIGHT_BYTES * prod(slot.shape)) for slot in tensor_slots(DENSE, TensorNames())),
    KV_BYTES,
)
LLAMA_3_8B = 8_030_261_248  # parameters of the model of this shape, by its maker's count


def held(split: Split) -> tuple[float, ...]:
    return MODEL.of(shards_of(DENSE, split))


def chosen(*ranks: RankFacts, asked: str | None = None) -> Split:
    split = None if asked is None else Split(tuple(map(int, asked.split(":"))))
    return choose_split(split, DENSE, held, ranks)


@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 1, 2)])
def test_ranks_together_hold_the_model_and_its_cache_once(shares: tuple[int, ...]) -> None:
    total = WEIGHT_BYTES * LLAMA_3_8B + 32 * KV_BYTES
    assert sum(held(Split(shares))) == pytest.approx(total, rel=1e-3)  # each has all norms
    first, last = held(Split(shares))[0], held(Split(shares))[-1]
    assert first / last == pytest.approx(shares[0] / shares[-1], rel=0.01)


def test_equal_and_almost_equal_cards_share_evenly() -> None:
    assert chosen(RankFacts(936e9), RankFacts(936e9)).shares == (1, 1)
    assert chosen(RankFacts(936e9), RankFacts(900e9)).shares == (1, 1)


def test_a_faster_card_gets_more() -> None:
    assert chosen(RankFacts(1008e9), RankFacts(336e9)).shares == (3, 1)


def test_a_card_gets_no_more_than_it_holds() -> None:
    total = sum(held(Split((1, 1))))
    ranks = RankFacts(1008e9, int(0.4 * total)), RankFacts(336e9, int(0.8 * total))
    first, last = held(chosen(*ranks))
    assert ranks[0].holds(first)
    assert ranks[1].holds(last)
    assert first > 0.3 * total


def test_asked_shares_are_kept_if_they_fit() -> None:
    ranks = RankFacts(1008e9, 8 * GIB), RankFacts(336e9, 8 * GIB)
    assert chosen(*ranks, asked="1:3").shares == (1, 3)


def test_asked_shares_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    ranks = RankFacts(1008e9, 2 * GIB), RankFacts(1008e9, 8 * GIB)
    with pytest.raises(MemoryPlanError) as error:
        chosen(*ranks, asked="3:1")
    said = str(error.value)
    assert "--gpu-split 3:1 does not fit: rank 0 needs" in said
    assert "of 2.00 GiB" in said
    nearest = said.partition("the nearest that fit: ")[2].partition(",")[0]
    assert nearest == "3:5", "8 heads do not divide by 1:2"
    assert chosen(*ranks, asked=nearest).shares == (3, 5)


def test_nothing_fits() -> None:
    with pytest.raises(MemoryPlanError, match="no others fit either; take a smaller"):
        chosen(RankFacts(936e9, GIB), RankFacts(936e9, GIB))


def test_the_first_candidate_is_even_and_none_comes_twice() -> None:
    found = [split.shares for split in candidates([RankFacts(3e9, 5), RankFacts(1e9, 25)])]
    assert found == [(1, 1), (3, 1), (3, 13)]
    assert [split.shares for split in candidates([RankFacts(1e9)] * 2)] == [(1, 1)]
