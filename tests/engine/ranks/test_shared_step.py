"""The description of a step in memory that ranks share, and as bytes between torch's devices."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest
import torch

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.shared_step import RankStep, SharedStep, payload_bytes
from appliance.engine.ranks.torch_step import (
    describe_step,
    pack,
    packed_bytes,
    step_tensors,
    unpack,
)
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.rows.ragged import AdapterRows, RaggedBatch, SealedSpans

CPU = torch.device("cpu")
HIDDEN = 576


def decode_step(num_seqs: int, length: int, block_size: int) -> RankStep:
    """A token of each sequence, with tables, open blocks, states and adapters."""
    width = -(-length // block_size)
    tables = [tuple(range(place * width, (place + 1) * width)) for place in range(num_seqs)]
    batch = RaggedBatch.of(
        [1] * num_seqs, [length] * num_seqs, tables, block_size=block_size, device=CPU
    )
    each = torch.arange(num_seqs, dtype=torch.int32)
    opened = each[:, None].contiguous()
    batch = replace(
        batch,
        sealed=SealedSpans(batch.context_lens, opened, (), ()),
        state_slots=each + 1,
        adapters=AdapterRows(each % 2 - 1, (), None),
    )
    tokens = torch.arange(num_seqs) + 7
    positions = torch.full((num_seqs,), length - 1)
    return RankStep(tokens, positions, batch, torch.arange(num_seqs), wants_logits=True)


def shared(num_rows: int, width: int) -> SharedStep:
    room = Room(0, payload_bytes(num_rows, width, HIDDEN))
    return SharedStep(Mapping.of(room.payload_bytes), 0, room)


@pytest.mark.parametrize("wanted", ["all", "last", "hidden"])
def test_another_rank_reads_what_rank_0_wrote(wanted: str) -> None:
    step = decode_step(5, 100, 16)
    if wanted == "all":
        step = replace(step, rows=None)
    elif wanted == "hidden":
        step = replace(step, wants_logits=False, batch=replace(step.batch, state_slots=None))
    memory = shared(5, 7)
    assert memory.write_step(step) <= payload_bytes(5, 7, HIDDEN)
    table = object()
    found = memory.read_step(table)
    assert found.wants_logits is step.wants_logits
    for own, other in zip(_tensors(found), _tensors(step), strict=True):
        assert (own is None) is (other is None)
        if own is not None and other is not None:
            assert own.numpy().ravel().tolist() == other.flatten().tolist()
    assert found.batch.adapters is not None
    assert found.batch.adapters.table is table


def _tensors(step: RankStep) -> list[torch.Tensor | None]:
    batch = step.batch
    names = ("query_start", "context_lens", "block_tables", "slot_mapping", "state_slots")
    assert set(names) <= {one.name for one in fields(batch)}
    assert batch.sealed is not None
    assert batch.adapters is not None
    own = [getattr(batch, name) for name in names]
    own += [batch.sealed.open_tables, batch.adapters.slots]
    return [step.token_ids, step.positions, step.rows, *own]


def test_rows_for_the_head_come_back() -> None:
    memory = shared(5, 7)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    memory.write_hidden(hidden)
    assert memory.read_hidden().tolist() == hidden.tolist()


@pytest.mark.parametrize("first", [0, 65_500, 1_000_000])
def test_blocks_of_any_number_come_back(first: int) -> None:
    step = decode_step(5, 100, 16)
    step.batch.block_tables.add_(first)
    memory = shared(5, 7)
    memory.write_step(step)
    tables = memory.read_step(None).batch.block_tables
    assert tables.numpy().dtype == "int32"
    assert tables.numpy().tolist() == step.batch.block_tables.tolist()


def test_a_step_of_16_sequences_of_4096_tokens_takes_10_kib() -> None:
    assert shared(16, 256).write_step(decode_step(16, 4096, block_size=16)) <= 10 << 10


def test_torchs_step_of_16_sequences_of_4096_tokens_is_mostly_their_blocks() -> None:
    block_size, most = 32, 10 << 10
    step = decode_step(16, 4096, block_size)
    blocks = 4 * 16 * 4096 // block_size
    tensors = step_tensors(step)
    message = describe_step(tensors, step)
    packed = pack(tensors, torch.zeros(16, dtype=torch.uint8))
    assert packed.numel() == packed_bytes(message)
    assert blocks < packed.numel() + len(msgspec.msgpack.encode(message)) <= most
    table = object()
    found = unpack(message, packed, table)
    assert found.batch.adapters is not None
    assert found.batch.adapters.table is table
    assert found.batch.block_tables.tolist() == step.batch.block_tables.tolist()
