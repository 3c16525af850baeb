"""Shares are chosen by memory and bandwidth, and those that do not fit are refused by name."""

from __future__ import annotations

import pytest
from rank_models import DENSE, shards_of

from appliance.engine.links.link import LinkSpeed
from appliance.engine.rank_split.choice import SplitPlan, candidates, choose_split
from appliance.engine.rank_split.pipeline import ParallelChoice, RankFacts, pipeline_cost
from appliance.errors import MemoryPlanError
from appliance.model.shard.split import Split
from tests.engine.rank_split.test_prediction import counted

FAST_LINK, SLOW_LINK = LinkSpeed(8e-6, 25e9), LinkSpeed(3e-3, 0.1e9)
GIB = 2**30
MODEL = counted(DENSE)


def chosen(*ranks: RankFacts, asked: str | None = None, link: LinkSpeed = FAST_LINK) -> SplitPlan:
    split = None if asked is None else Split(tuple(map(int, asked.split(":"))))
    return choose_split(split, MODEL, lambda split: shards_of(DENSE, split), ranks, link)


def test_equal_and_almost_equal_cards_share_evenly() -> None:
    assert chosen(RankFacts(936e9), RankFacts(936e9)).split.shares == (1, 1)
    assert chosen(RankFacts(936e9), RankFacts(900e9)).split.shares == (1, 1)


def test_a_faster_card_gets_more() -> None:
    plan = chosen(RankFacts(1008e9), RankFacts(336e9))
    assert plan.split.shares == (3, 1)
    even = chosen(RankFacts(1008e9), RankFacts(336e9), asked="1:1")
    assert plan.prediction.seconds < 0.6 * even.prediction.seconds
    assert plan.prediction.busy[0] == pytest.approx(plan.prediction.busy[1], rel=0.05)


def test_a_card_gets_no_more_than_it_holds() -> None:
    total = sum(chosen(RankFacts(1.0), RankFacts(1.0)).work.holds)
    fast = RankFacts(1008e9, int(0.4 * total))
    plan = chosen(fast, RankFacts(336e9, int(0.8 * total)))
    assert plan.fits([fast, RankFacts(336e9, int(0.8 * total))])
    assert plan.work.holds[0] > 0.3 * total, "as much as it can"


def test_asked_shares_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    ranks = RankFacts(1008e9, 2 * GIB), RankFacts(1008e9, 8 * GIB)
    with pytest.raises(MemoryPlanError) as error:
        chosen(*ranks, asked="3:1")
    said = str(error.value)
    assert "--gpu-split 3:1 does not fit: rank 0 needs" in said
    assert "of 2.00 GiB" in said
    nearest = said.partition("the nearest that fit: ")[2].split(" ")[0]
    assert chosen(*ranks, asked=nearest).fits(ranks)
    assert "ms a token" in said
    assert nearest == "3:5", "8 heads do not divide by 1:2"


def test_nothing_fits() -> None:
    with pytest.raises(MemoryPlanError, match="no others fit either; take a smaller"):
        chosen(RankFacts(936e9, GIB), RankFacts(936e9, GIB))


def test_the_first_candidate_is_even_and_none_comes_twice() -> None:
    found = [split.shares for split in candidates([RankFacts(3e9, 5), RankFacts(1e9, 25)])]
    assert found[0] == (1, 1)
    assert len(found) == len(set(found))
    assert {(3, 1), (1, 5)} <= set(found)


def test_a_slow_link_is_better_for_a_pipeline() -> None:
    """Layers are divided over 65 exchanges a token, and a pipeline hands over once."""
    ranks = [RankFacts(936e9), RankFacts(936e9)]
    for link, is_tensor in ((FAST_LINK, True), (SLOW_LINK, False)):
        of_pipeline = (MODEL.layer_costs(), MODEL.vocabulary, ranks, link, 8192.0, (0, 16, 32))
        tensor = chosen(*ranks, link=link).prediction.seconds
        found = ParallelChoice(tensor, pipeline_cost(*of_pipeline))
        assert found.is_tensor is is_tensor
        assert str(found).startswith("tensor" if is_tensor else "pipeline")
