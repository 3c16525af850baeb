"""Cuts a step into micro-batches, which pass the stages of a pipeline in turn.

A row's result depends neither on the rows beside it nor on how its prompt is cut, so any cut is
valid. Every stage runs the micro-batches in order, so a row reads what earlier rows wrote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.ragged import SealedSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from appliance.engine.ranks.shared_step import RankStep
    from appliance.kernels.ragged import RaggedBatch

# The time of a row's arithmetic over that of reading all weights: 0.4 with SmolLM2-135M on a CPU,
# 0.1 with a model of 0.5B.
ROW_COST = 0.25


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a step.

    Attributes:
        step: of these rows alone.
        places: of its results among the step's.
        begin: its first result among those of all micro-batches in turn.
    """

    step: RankStep
    places: NDArray[np.int64]
    begin: int


def micro_batch_bounds(num_rows: int, size: int) -> tuple[int, ...]:
    """Return the first row of each micro-batch, then the number of rows.

    Of m micro-batches a stage idles (size - 1) / (m + size - 1) of the turns, but each reads all
    of a stage's weights. m is what makes m + size - 1 turns of 1 + ROW_COST * num_rows / m the
    shortest.
    """
    best = round(math.sqrt((size - 1) * num_rows * ROW_COST))
    count = min(num_rows, max(1, best))
    return tuple(num_rows * number // count for number in range(count + 1))


def turns(count: int, size: int) -> list[tuple[int | None, ...]]:
    """Return the micro-batch that each stage runs in each turn; None if it idles."""
    return [
        tuple(turn - rank if 0 <= turn - rank < count else None for rank in range(size))
        for turn in range(count + size - 1)
    ]


def cut_step(step: RankStep, bounds: Sequence[int]) -> list[MicroBatch]:
    """Cut a step at these rows."""
    num_rows = len(step.token_ids)
    wanted = np.arange(num_rows) if step.rows is None else np.asarray(step.rows.numpy())
    found, begin = [], 0
    for first, last in pairwise(bounds):
        places = np.flatnonzero((first <= wanted) & (wanted < last))
        found.append(MicroBatch(_cut(step, first, last, wanted[places] - first), places, begin))
        begin += len(places)
    return found


def _cut(step: RankStep, first: int, last: int, rows: NDArray[np.int64]) -> RankStep:
    return replace(
        step,
        token_ids=step.token_ids[first:last],
        positions=step.positions[first:last],
        batch=_cut_batch(step.batch, first, last),
        rows=arrays.of_numpy(rows),
    )


def _cut_batch(batch: RaggedBatch, first: int, last: int) -> RaggedBatch:
    """Return the sequences with rows in a range; the last context ends with its last row."""
    starts = np.asarray(batch.query_start.numpy())
    begin = int(np.searchsorted(starts, first, side="right")) - 1
    end = int(np.searchsorted(starts, last, side="left"))
    own = slice(begin, end)
    contexts = batch.context_lens[own].clone()
    contexts[-1] -= max(int(starts[end]) - last, 0)
    sealed, adapters = batch.sealed, batch.adapters
    unused = (0,) * (end - begin)  # only torch's executor reads what the host knows
    return replace(
        batch,
        query_start=arrays.of_numpy(np.clip(starts[begin : end + 1], first, last) - first),
        context_lens=contexts,
        block_tables=batch.block_tables[own],
        slot_mapping=batch.slot_mapping[first:last],
        host_query_lens=unused,
        host_context_lens=unused,
        sealed=None if sealed is None else SealedSpans(contexts, sealed.open_tables[own], (), ()),
        state_slots=None if batch.state_slots is None else batch.state_slots[own],
        adapters=None if adapters is None else replace(adapters, slots=adapters.slots[own]),
    )
