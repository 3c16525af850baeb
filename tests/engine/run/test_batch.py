from __future__ import annotations

from array import array

import pytest
import torch

from appliance.engine.nouns.moves import StateMoves
from appliance.engine.nouns.plan import Plan, ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.run.batch import stage
from appliance.engine.run.cuda_graphs import StepSize
from appliance.engine.run.geometry import Geometry, Spare
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.sampler import Sampler
from appliance.engine.run.staging import Staging, StepShape, StepTensors
from appliance.kernels.attention.work import NO_TILE
from appliance.kernels.penalties.cpu import penalize
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.rows.state_spans import StateSpans
from appliance.kernels.sampling import batched

LARGEST = StepShape(
    64, 24, 16, 8, True, True,
    num_tiles=24,
    num_spans=16,
    num_chunks=16,
)  # fmt: skip


def sequence(tokens: list[int], table: list[int], slot: int) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(tokens), sampling=SamplingParams())
    return Sequence(request, block_table=array("i", table), slot=slot)


def staged(
    *scheduled: ScheduledSequence,
    spare: Spare | None = None,
    size: StepSize | None = None,
    states: StateMoves | None = None,
) -> tuple[StepTensors, RaggedBatch]:
    return staged_plan(Plan(scheduled, states=states), spare, size)


def staged_plan(
    plan: Plan, spare: Spare | None, size: StepSize | None
) -> tuple[StepTensors, RaggedBatch]:
    device = HostDevice()
    staging = Staging(device, LARGEST)
    for tensor in (staging.memory,):
        tensor.fill_(77)  # leftovers of the step before
    sampler = Sampler((), batched.choose, penalize, device, num_slots=8, vocab_size=300)
    geometry = Geometry.of(plan, 16, spare, size)
    shape, _ = stage(plan.scheduled, geometry, staging, sampler, {})
    tensors = staging.send(shape)
    return tensors, geometry.ragged(tensors, tensors.block_tables)


def test_decodes_and_chunks_lie_side_by_side() -> None:
    decoding = sequence(list(range(100, 118)), [7, 2, 9], 1)
    chunk = sequence(list(range(200, 250)), [4, 5, 6, 1], 2)
    tensors, batch = staged(
        ScheduledSequence(decoding, start=17, num_tokens=1, samples=True),
        ScheduledSequence(chunk, start=14, num_tokens=5, samples=False),
    )
    assert tensors.token_ids.tolist() == [117, 214, 215, 216, 217, 218]
    assert tensors.positions.tolist() == [17, 14, 15, 16, 17, 18]
    assert tensors.sample_rows.tolist() == [0]
    assert batch.slot_mapping.tolist() == [33, 78, 79, 80, 81, 82]
    assert batch.query_start.tolist() == [0, 1, 6]
    assert batch.context_lens.tolist() == [18, 19]
    assert (batch.host_query_lens, batch.host_context_lens) == ((1, 5), (18, 19))
    assert batch.num_decodes == 1
    assert batch.block_tables[:, :2].tolist() == [[7, 2], [4, 5]]


def test_a_padded_step_has_room_behind_single_rows_and_behind_prompts() -> None:
    decoding = sequence(list(range(100, 118)), [7, 2, 9], 1)
    chunk = sequence(list(range(200, 250)), [4, 5, 6, 1], 2)
    size = StepSize(3, 32)
    tensors, batch = staged(
        ScheduledSequence(decoding, start=17, num_tokens=1, samples=True),
        ScheduledSequence(chunk, start=14, num_tokens=5, samples=True),
        spare=Spare(8),
        size=size,
    )
    assert tensors.token_ids.tolist() == [117, 0, 0, 214, 215, 216, 217, 218, *[0] * 27]
    assert tensors.positions.tolist() == [17, 0, 0, 14, 15, 16, 17, 18, *[0] * 27]
    assert tensors.sample_rows.tolist() == [0, 7, *[0] * 9]
    assert batch.slot_mapping[:8].tolist() == [33, 128, 129, 78, 79, 80, 81, 82]
    assert batch.slot_mapping[8:].tolist() == [*range(128, 144), *range(128, 139)]
    assert batch.query_start.tolist() == [0, 1, 2, 3, *[8] * 8]
    assert batch.context_lens.tolist() == [18, 1, 1, 19, *[0] * 7]
    assert batch.num_decodes == 3
    assert batch.block_tables[:, 0].tolist() == [7, 8, 8, 4, *[8] * 7]
    assert batch.prefill_tiles is not None
    assert batch.prefill_tiles.tolist() == [[3, 0], *[list(NO_TILE)] * 7]


def test_rows_of_prompts_follow_the_single_ones_if_none_verifies_drafts() -> None:
    tokens = list(range(100, 130))
    decoding = ScheduledSequence(sequence(tokens, [7, 2], 1), start=29, num_tokens=1, samples=True)
    chunk = ScheduledSequence(sequence(tokens, [4, 5], 2), start=3, num_tokens=9, samples=False)
    drafted = ScheduledSequence(
        sequence(tokens, [6, 1], 3), start=29, num_tokens=3, samples=True, drafts=(5, 6)
    )
    found = [
        staged(*scheduled)[1].prompts_from
        for scheduled in ((decoding, chunk), (chunk,), (decoding,), (decoding, chunk, drafted))
    ]
    assert found == [1, 0, None, None]
    padded = [
        staged(*scheduled, spare=Spare(8), size=size)[1].prompts_from
        for scheduled, size in (
            ((decoding, chunk), StepSize(3, 32)),
            ((decoding,), StepSize(3)),
            ((drafted,), StepSize(1, draft_rows=3, rows_each=4)),
        )
    ]
    assert padded == [3, None, None]


def test_a_padded_step_seals_only_what_is_full() -> None:
    decoding = sequence(list(range(100, 116)), [7], 1)
    chunk = sequence(list(range(200, 250)), [4, 5, 6, 1], 2)
    plan = Plan(
        (
            ScheduledSequence(decoding, start=15, num_tokens=1, samples=True),
            ScheduledSequence(chunk, start=14, num_tokens=20, samples=False),
        ),
        open_blocks=((20,), (21, 22, 23)),
    )
    spare = Spare(8, open_block=30)
    tensors, batch = staged_plan(plan, spare, StepSize(2, 32))
    assert batch.sealed is not None
    assert batch.sealed.moves is not None
    assert tensors.open_tables is not None
    empty = [-1, -1]
    assert batch.sealed.moves.tolist() == [[20, 7], empty, [21, 4], [22, 5], *[empty] * 16]
    assert tensors.open_tables.tolist() == [20, 30, 21, 22, 23, *[30] * 15]
    assert batch.sealed.lens.tolist() == [0, 0, 0, 16, 32, *[0] * 15]
    assert batch.sealed.slot_mapping is not None
    first, padding, *chunks = batch.sealed.slot_mapping.tolist()
    assert (first, padding) == (20 * 16 + 15, 30 * 16)
    assert chunks[:20] == [350, 351, *range(352, 368), 368, 369]
    assert chunks[20:] == list(range(480, 492))


@pytest.mark.parametrize(("sees_pictures", "decodes"), [(False, 2), (True, 1)])
def test_a_row_alone_in_its_block_that_may_see_the_next_one_does_not_decode(
    sees_pictures: bool, decodes: int
) -> None:
    decoding = sequence(list(range(100, 116)), [7], 1)
    chunk = sequence(list(range(200, 250)), [4, 5, 6, 1], 2)
    plan = Plan(
        (
            ScheduledSequence(decoding, start=15, num_tokens=1, samples=True),
            ScheduledSequence(chunk, start=15, num_tokens=20, samples=False),
        ),
        open_blocks=((20,), (21, 22, 23)),
    )
    geometry = Geometry.of(plan, 16, sees_pictures=sees_pictures)
    assert geometry.query_lens == [1, 1, 16, 3]
    assert geometry.num_decodes == decodes


def test_each_sequence_names_its_state_slot() -> None:
    scheduled = (
        ScheduledSequence(sequence([1, 2, 3], [8], 5), start=2, num_tokens=1, samples=True),
        ScheduledSequence(sequence([1, 2, 3], [9], 2), start=1, num_tokens=2, samples=True),
    )
    _, batch = staged(*scheduled)
    assert batch.state_slots is None
    assert batch.host_state_slots is None
    spare = Spare(11, state_slot=40)
    padded = (scheduled[0], scheduled[1]._replace(start=2, num_tokens=1))
    for entries, size, slots in (
        (scheduled, None, [4, 1]),
        (padded, StepSize(4), [4, 1, 40, 40]),
    ):
        _, batch = staged(*entries, spare=spare, size=size, states=StateMoves())
        assert batch.state_slots is not None
        assert batch.state_slots.tolist() == slots
        assert batch.state_slots.dtype == torch.int32
        assert batch.host_state_slots == tuple(slots)


def test_a_padded_step_names_the_rows_that_pass_through_each_state() -> None:
    tokens = list(range(50))
    scheduled = (
        ScheduledSequence(sequence(tokens, [7, 2], 5), start=17, num_tokens=1, samples=True),
        ScheduledSequence(sequence(tokens, [4, 5, 6], 2), start=14, num_tokens=20, samples=True),
        ScheduledSequence(sequence(tokens, [1, 3], 4), start=0, num_tokens=6, samples=False),
    )
    spare = Spare(8, open_block=30, state_slot=40)
    opened = ((20,), (21, 22, 23), (24,))
    # A sealed cache lays a chunk out as several sequences, which still form one span.
    for open_blocks, place in ((None, Spare(8, state_slot=40)), (opened, spare)):
        plan = Plan(scheduled, states=StateMoves(), open_blocks=open_blocks)
        _, batch = staged_plan(plan, place, StepSize(2, 32))
        spans = StateSpans.of(batch)
        assert spans.slots.tolist() == [4, 40, 1, 3, *[40] * 6]
        assert spans.goes_on.tolist() == [True, False, True, *[False] * 7]
        assert spans.firsts.tolist() == [0, 1, 2, 22, *[0] * 6]
        assert spans.lens.tolist() == [1, 1, 20, 6, *[0] * 6]
        assert (spans.longest, spans.num_rows) == (32, 34)
        assert spans.chunks is not None
        assert spans.chunks.spans.tolist() == [2, *[9] * 7]
        assert spans.chunks.starts.tolist() == [0, 0, 0, *[1] * 7]
    place = Spare(8, state_slot=40)
    _, batch = staged(scheduled[0], spare=place, size=StepSize(4), states=StateMoves())
    decode = StateSpans.of(batch)
    assert decode.slots.tolist() == [4, 40, 40, 40]
    assert decode.lens.tolist() == [1, 1, 1, 1]
    assert decode.chunks is None


def test_tables_are_padded_to_the_widest() -> None:
    short, long = sequence([1, 2, 3], [8], 1), sequence(list(range(40)), [3, 1, 2], 2)
    tensors, batch = staged(
        ScheduledSequence(short, start=2, num_tokens=1, samples=True),
        ScheduledSequence(long, start=0, num_tokens=40, samples=True),
    )
    assert batch.block_tables.tolist() == [[8, 0, 0], [3, 1, 2]]
    assert tensors.sample_rows.tolist() == [0, 40]


def test_rows_that_fill_up_write_to_the_spare_block_and_no_two_to_one_place() -> None:
    decoding = sequence(list(range(18)), [7, 2], 1)
    tensors, batch = staged(
        ScheduledSequence(decoding, start=17, num_tokens=1, samples=True),
        spare=Spare(9),
        size=StepSize(4),
    )
    assert tensors.token_ids.tolist() == [17, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [33, 144, 145, 146]
    assert batch.context_lens.tolist() == [18, 1, 1, 1]
    assert batch.block_tables.tolist() == [[7, 2], [9, 0], [9, 0], [9, 0]]
    assert tensors.sampling.temperature.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(batch.query_start, torch.arange(5, dtype=torch.int32))
