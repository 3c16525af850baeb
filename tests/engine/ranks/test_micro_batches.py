"""A step is cut into micro-batches that keep its rows, contexts and answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from appliance.engine.ranks.pipeline import (
    ROW_COST,
    cut_step,
    micro_batch_bounds,
    turns,
)
from appliance.engine.ranks.shared_step import RankStep
from appliance.kernels.rows.ragged import RaggedBatch


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 64, 512])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_there_are_as_many_micro_batches_as_take_the_least_time(num_rows: int, size: int) -> None:
    bounds = micro_batch_bounds(num_rows, size)

    def time_of(count: int) -> float:
        return (count + size - 1) * (1 + ROW_COST * num_rows / count)

    best = min(map(time_of, range(1, num_rows + 1)))
    assert time_of(len(bounds) - 1) <= 1.02 * best
    assert (bounds[0], bounds[-1]) == (0, num_rows)
    lengths = [last - first for first, last in pairwise(bounds)]
    assert max(lengths) - min(lengths) <= 1


def test_few_streams_are_not_cut_and_a_prompt_is() -> None:
    assert micro_batch_bounds(2, 2) == (0, 2)
    assert len(micro_batch_bounds(512, 2)) == 12


def test_two_micro_batches_occupy_both_stages_in_the_turn_between() -> None:
    assert turns(2, 2) == [(0, None), (1, 0), (None, 1)]


@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 2), (5, 3), (3, 5)])
def test_each_stage_runs_each_micro_batch_once_after_the_stage_before(
    count: int, size: int
) -> None:
    found = turns(count, size)
    at = {(rank, n): turn for turn, row in enumerate(found) for rank, n in enumerate(row)}
    for rank in range(size):
        assert [row[rank] for row in found if row[rank] is not None] == list(range(count))
        if rank:
            assert all(at[rank, n] == at[rank - 1, n] + 1 for n in range(count))
    idle = sum(row[0] is None for row in found)
    assert idle == size - 1


def step_of(rows: torch.Tensor | None) -> RankStep:
    """Two sequences of 3 and 5 rows, the second one after 20 tokens."""
    batch = RaggedBatch.of(
        [3, 5],
        [3, 25],
        [[4], [7, 2]],
        block_size=16,
        device=torch.device("cpu"),
        state_slots=[6, 1],
    )
    positions = torch.tensor([0, 1, 2, 20, 21, 22, 23, 24])
    return RankStep(torch.arange(100, 108), positions, batch, rows, wants_logits=True)


def test_a_sequence_may_lie_in_two_micro_batches() -> None:
    first, second = (part.step for part in cut_step(step_of(None), (0, 5, 8)))
    assert first.token_ids.tolist() == [100, 101, 102, 103, 104]
    assert first.batch.query_start.tolist() == [0, 3, 5]
    assert first.batch.context_lens.tolist() == [3, 22]
    assert first.batch.block_tables.tolist() == [[4, 0], [7, 2]]
    assert second.positions.tolist() == [22, 23, 24]
    assert second.batch.query_start.tolist() == [0, 3]
    assert second.batch.context_lens.tolist() == [25]
    assert second.batch.block_tables.tolist() == [[7, 2]]
    assert second.batch.state_slots is not None
    assert second.batch.state_slots.tolist() == [1]
    assert second.batch.slot_mapping.tolist() == [38, 39, 40]
    assert second.batch.num_seqs == 1


def test_answers_go_back_to_the_places_where_they_were_wanted() -> None:
    """A step may request its rows in any order, and none of some micro-batch."""
    parts = cut_step(step_of(torch.tensor([7, 0, 6, 1])), (0, 2, 5, 8))
    wanted = [None if part.step.rows is None else part.step.rows.tolist() for part in parts]
    assert wanted == [[0, 1], [], [2, 1]]
    assert [part.places.tolist() for part in parts] == [[1, 3], [], [0, 2]]
    assert [part.begin for part in parts] == [0, 2, 2]
