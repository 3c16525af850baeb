from __future__ import annotations

from array import array

import torch

from appliance.engine.moves import StateMoves
from appliance.engine.plan import Plan, ScheduledSequence
from appliance.engine.request import Request, SamplingParams
from appliance.engine.run.batch import Geometry, Spare, stage
from appliance.engine.run.device import HostDevice
from appliance.engine.run.sampler import Sampler
from appliance.engine.run.staging import Staging, StepShape, StepTensors
from appliance.engine.sequence import Sequence
from appliance.kernels.penalties.cpu import penalize
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.sampling import batched

LARGEST = StepShape(num_tokens=64, num_seqs=8, num_samples=8, table_width=8)


def sequence(tokens: list[int], table: list[int], slot: int) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(tokens), sampling=SamplingParams())
    return Sequence(request, block_table=array("i", table), slot=slot)


def staged(
    *scheduled: ScheduledSequence,
    spare: Spare | None = None,
    padding: int = 0,
    states: StateMoves | None = None,
) -> tuple[StepTensors, RaggedBatch]:
    device = HostDevice()
    staging = Staging(device, LARGEST)
    for tensor in (staging._memory,):
        tensor.fill_(77)  # whatever the step before has left
    sampler = Sampler((), batched.choose, penalize, device, num_slots=8, vocab_size=300)
    geometry = Geometry.of(Plan(scheduled, states=states), 16, spare, padding)
    shape, _ = stage(scheduled, geometry, staging, sampler, {})
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


def test_each_sequence_names_its_state_slot() -> None:
    scheduled = (
        ScheduledSequence(sequence([1, 2, 3], [8], 5), start=2, num_tokens=1, samples=True),
        ScheduledSequence(sequence([1, 2, 3], [9], 2), start=1, num_tokens=2, samples=True),
    )
    _, batch = staged(*scheduled)
    assert batch.state_slots is None
    assert batch.host_state_slots is None
    spare = Spare(11, state_slot=40)
    for padding, slots in ((0, [4, 1]), (2, [4, 1, 40, 40])):
        _, batch = staged(*scheduled, spare=spare, padding=padding, states=StateMoves())
        assert batch.state_slots is not None
        assert batch.state_slots.tolist() == slots
        assert batch.state_slots.dtype == torch.int32
        assert batch.host_state_slots == tuple(slots)


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
        padding=3,
    )
    assert tensors.token_ids.tolist() == [17, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [33, 144, 145, 146]
    assert batch.context_lens.tolist() == [18, 1, 1, 1]
    assert batch.block_tables.tolist() == [[7, 2], [9, 0], [9, 0], [9, 0]]
    assert tensors.temperature.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(batch.query_start, torch.arange(5, dtype=torch.int32))
