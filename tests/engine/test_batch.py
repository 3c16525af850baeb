from __future__ import annotations

from array import array

import torch

from appliance.engine.batch import build
from appliance.engine.plan import Plan, ScheduledSequence
from appliance.engine.request import Request, SamplingParams
from appliance.engine.sequence import Sequence


def sequence(tokens: list[int], table: list[int]) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(tokens), sampling=SamplingParams())
    return Sequence(request, block_table=array("i", table))


def test_decodes_and_chunks_lie_side_by_side() -> None:
    decoding = sequence(list(range(100, 118)), [7, 2, 9])
    chunk = sequence(list(range(200, 250)), [4, 5, 6, 1])
    plan = Plan(
        scheduled=(
            ScheduledSequence(decoding, start=17, num_tokens=1, samples=True),
            ScheduledSequence(chunk, start=14, num_tokens=5, samples=False),
        )
    )
    batch = build(plan, 16, torch.device("cpu"))
    assert batch.token_ids.tolist() == [117, 214, 215, 216, 217, 218]
    assert batch.positions.tolist() == [17, 14, 15, 16, 17, 18]
    assert batch.ragged.slot_mapping.tolist() == [33, 78, 79, 80, 81, 82]
    assert batch.ragged.query_start.tolist() == [0, 1, 6]
    assert batch.ragged.context_lens.tolist() == [18, 19]
    assert batch.ragged.num_decodes == 1
    assert batch.sample_rows.tolist() == [0]
    assert batch.sampling == (decoding,)
    # Only the blocks that the context reaches are listed, padded to the widest.
    assert batch.ragged.host_block_tables == ((7, 2), (4, 5))
    assert batch.ragged.block_tables.tolist() == [[7, 2], [4, 5]]


def test_tables_are_padded_to_the_widest() -> None:
    short, long = sequence([1, 2, 3], [8]), sequence(list(range(40)), [3, 1, 2])
    plan = Plan(
        scheduled=(
            ScheduledSequence(short, start=2, num_tokens=1, samples=True),
            ScheduledSequence(long, start=0, num_tokens=40, samples=True),
        )
    )
    batch = build(plan, 16, torch.device("cpu"))
    assert batch.ragged.block_tables.tolist() == [[8, 0, 0], [3, 1, 2]]
    assert batch.sample_rows.tolist() == [0, 40]
