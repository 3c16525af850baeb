"""A step for torch's ranks: the host's numbers as a message, the device's tensors as bytes.

Rank 0's device broadcasts the bytes, so they include tokens that only the device knows, and a
captured step finds them at fixed addresses.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from appliance.engine.ranks.messages import RunStep
from appliance.engine.ranks.shared_step import RankStep
from appliance.kernels.rows.host_spans import SpanRows
from appliance.kernels.rows.ragged import AdapterRows, RaggedBatch, SealedSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ALIGNMENT = 16  # bytes that kernels load at once
_NONE = -1
_SPANS = [part.name for part in fields(SpanRows)]
_TYPES = (
    *(torch.int64,) * 3,  # tokens, positions, slots
    *(torch.int32,) * 3,  # first rows, contexts, block tables
    torch.int64,  # rows
    *(torch.int32,) * 2,  # closed tokens, open blocks
    *(torch.int64,) * 2,  # open slots, blocks to seal
    *(torch.int32,) * 3,  # state slots, tiles of prompts, adapters' slots
    *(torch.bool if name == "span_goes_on" else torch.int64 for name in _SPANS),
)


def step_tensors(step: RankStep) -> tuple[Tensor | None, ...]:
    """List the tensors of a step; all are whole numbers or truth values."""
    batch, sealed, spans = step.batch, step.batch.sealed, step.batch.span_rows
    return (
        step.token_ids,
        step.positions,
        batch.slot_mapping,
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        step.rows,
        None if sealed is None else sealed.lens,
        None if sealed is None else sealed.open_tables,
        None if sealed is None else sealed.slot_mapping,
        None if sealed is None else sealed.moves,
        batch.state_slots,
        batch.prefill_tiles,
        None if batch.adapters is None else batch.adapters.slots,
        *(None if spans is None else getattr(spans, name) for name in _SPANS),
    )


def describe_step(tensors: Sequence[Tensor | None], step: RankStep) -> RunStep:
    """Return the host's numbers of a step."""
    batch, sealed = step.batch, step.batch.sealed
    return RunStep(
        counts=tuple(_NONE if tensor is None else tensor.numel() for tensor in tensors),
        wants_logits=step.wants_logits,
        query_lens=batch.host_query_lens,
        context_lens=batch.host_context_lens,
        num_decodes=batch.num_decodes,
        decode_rows=batch.decode_rows,
        sealed_lens=None if sealed is None else sealed.host_lens,
        open_tables=None if sealed is None else sealed.host_open_tables,
        state_slots=batch.host_state_slots,
    )


def pack(tensors: Sequence[Tensor | None], gap: Tensor) -> Tensor:
    """Lay a step's tensors side by side in bytes, padded with `gap` (ALIGNMENT,) uint8."""
    pieces = []
    for tensor, dtype in zip(tensors, _TYPES, strict=True):
        if tensor is None:
            continue
        assert tensor.dtype == dtype, (tensor.dtype, dtype)
        piece = tensor.contiguous().view(-1).view(torch.uint8)
        pieces += [piece, gap[: -piece.numel() % ALIGNMENT]]
    return torch.cat(pieces)


def packed_bytes(step: RunStep) -> int:
    """Return the number of bytes that `pack` makes of a step's tensors."""
    return sum(
        -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        for count, dtype in zip(step.counts, _TYPES, strict=True)
        if count != _NONE
    )


def unpack(step: RunStep, packed: Tensor, adapters: object | None) -> RankStep:
    """Rebuild a step whose tensors are views of packed bytes.

    Args:
        adapters: this rank's table of slots.
    """
    found: list[Tensor | None] = []
    begin = 0
    for count, dtype in zip(step.counts, _TYPES, strict=True):
        if count == _NONE:
            found.append(None)
            continue
        end = begin + count * dtype.itemsize
        found.append(packed[begin:end].view(dtype))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    tokens, positions, slots, starts, contexts, tables, rows = found[:7]
    lens, opened, open_slots, moves, states, tiles, lora, *spans = found[7:]
    assert tokens is not None
    assert positions is not None
    assert slots is not None
    assert starts is not None
    assert contexts is not None
    assert tables is not None
    num_seqs = len(step.query_lens)
    batch = RaggedBatch(
        query_start=starts,
        context_lens=contexts,
        block_tables=tables.view(num_seqs, -1),
        slot_mapping=slots,
        num_decodes=step.num_decodes,
        host_query_lens=step.query_lens,
        host_context_lens=step.context_lens,
        sealed=None if lens is None else _spans(step, lens, opened, open_slots, moves),
        decode_rows=step.decode_rows,
        state_slots=states,
        adapters=None if lora is None else AdapterRows(lora, (), adapters),
        host_state_slots=step.state_slots,
        prefill_tiles=None if tiles is None else tiles.view(-1, 2),
        span_rows=_span_rows(spans),
    )
    return RankStep(tokens, positions, batch, rows, step.wants_logits)


def _span_rows(found: Sequence[Tensor | None]) -> SpanRows | None:
    present = [tensor for tensor in found if tensor is not None]
    return SpanRows(*present) if present else None


def _spans(
    step: RunStep,
    lens: Tensor,
    opened: Tensor | None,
    slots: Tensor | None,
    moves: Tensor | None,
) -> SealedSpans:
    assert opened is not None
    assert step.sealed_lens is not None
    assert step.open_tables is not None
    return SealedSpans(
        lens=lens,
        open_tables=opened.view(len(lens), -1),
        host_lens=step.sealed_lens,
        host_open_tables=step.open_tables,
        slot_mapping=slots,
        moves=None if moves is None else moves.view(-1, 2),
    )
