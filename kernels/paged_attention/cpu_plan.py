"""Which keys each row reads on the CPU, built once per step and shared by all layers.

A row's arithmetic has to depend on its own position alone, not on its neighbours in the batch nor
on how its prompt was cut: matrix products sum in an order that follows from their shapes. So rows
stand in query tiles at fixed positions, and the keys of a tile end where its position says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from appliance.kernels.ragged import RaggedBatch

TILE = 32  # rows that torch's flash kernel takes at a time, up to 191 rows a call
SEGMENT = 128  # rows of one prefill call
KEY_BLOCK = 512  # keys that torch's flash kernel takes at a time, from the first one on
# Up to here keys end at a multiple of SEGMENT, beyond at one of KEY_BLOCK: a few padded keys cost
# less there than decode rows that cannot share a call because their lengths differ.
FINE_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose padded contexts have one length: a single batched call."""

    rows: Tensor | None  # (group,) int64 rows of the step; None means the first ones, all of them
    slots: Tensor  # (group * keys,) int64
    mask: Tensor  # (group, 1, 1, keys) float32, 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows of one chunk that share a segment of absolute positions."""

    start: int  # rows of the step
    stop: int
    lead: int  # rows of padding before them, up to the tile's beginning
    keys: slice  # among the chunk's slots
    mask: Tensor  # (padded rows, keys) float32, 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several rows of one sequence; its keys are gathered once."""

    slots: Tensor  # (keys,) int64
    segments: tuple[PrefillSegment, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All rows of a step, for the layers that have one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class CpuAttentionWork:
    """What the layers of one step share; a layout is built when the first layer asks for it."""

    batch: RaggedBatch
    block_size: int
    layouts: dict[int | None, Layout] = field(default_factory=dict)

    def layout(self, window: int | None) -> Layout:
        """The step's rows, for layers with this window."""
        if window not in self.layouts:
            self.layouts[window] = Layout(
                groups=_decode_groups(self.batch, self.block_size, window),
                chunks=_prefill_chunks(self.batch, self.block_size, window),
            )
        return self.layouts[window]


def plan_attention(batch: RaggedBatch, block_size: int) -> CpuAttentionWork:
    """Prepare a step for `cpu.paged_attention`."""
    return CpuAttentionWork(batch, block_size)


def key_range(position: int, window: int | None) -> tuple[int, int]:
    """First and last + 1 of the keys that a row at `position` is computed over.

    It holds all the keys that the row sees, and is the same for all rows of a segment. Whole
    blocks of masked keys before or after them would change nothing, a last block of another
    length might.
    """
    segment = position // SEGMENT * SEGMENT
    stop = segment + SEGMENT
    if window is not None:
        return max(0, segment - window + 1) // SEGMENT * SEGMENT, stop
    return 0, stop if stop <= FINE_CONTEXT else _round_up(stop, KEY_BLOCK)


def _decode_groups(
    batch: RaggedBatch, block_size: int, window: int | None
) -> tuple[DecodeGroup, ...]:
    contexts = batch.host_context_lens[: batch.num_decodes]
    by_length: dict[int, list[int]] = {}
    firsts = []
    for row, context in enumerate(contexts):
        first, stop = key_range(context - 1, window)
        firsts.append(first)
        by_length.setdefault(stop - first, []).append(row)
    groups = []
    for length, rows in by_length.items():
        index = torch.tensor(rows)
        first_key = torch.tensor([firsts[row] for row in rows]).unsqueeze(1)
        position = torch.tensor([contexts[row] - 1 for row in rows]).unsqueeze(1)
        key = first_key + torch.arange(length)  # (group, keys)
        slots = _slots(batch.block_tables[index], key, position, block_size)
        mask = _mask(key, position, window)
        groups.append(
            DecodeGroup(
                rows=None if len(by_length) == 1 else index,
                slots=slots.flatten(),
                mask=mask.view(len(rows), 1, 1, length),
            )
        )
    return tuple(groups)


def _prefill_chunks(
    batch: RaggedBatch, block_size: int, window: int | None
) -> tuple[PrefillChunk, ...]:
    chunks = []
    row = batch.num_decodes
    for i in range(batch.num_decodes, batch.num_seqs):
        rows, context = batch.host_query_lens[i], batch.host_context_lens[i]
        begin = context - rows  # position of the chunk's first row
        first, _ = key_range(begin, window)
        _, stop = key_range(context - 1, window)
        key = torch.arange(first, stop).unsqueeze(0)
        last = torch.tensor([[context - 1]])
        segments = []
        for segment in range(begin // SEGMENT * SEGMENT, context, SEGMENT):
            start, end = max(begin, segment), min(context, segment + SEGMENT)
            tile = start // TILE * TILE
            position = torch.arange(tile, _round_up(end, TILE)).unsqueeze(1)
            low, high = key_range(segment, window)
            keys = slice(low - first, high - first)
            segments.append(
                PrefillSegment(
                    start=row + start - begin,
                    stop=row + end - begin,
                    lead=start - tile,
                    keys=keys,
                    mask=_mask(key[:, keys], position, window),
                )
            )
        slots = _slots(batch.block_tables[i : i + 1], key, last, block_size)
        chunks.append(PrefillChunk(slots.flatten(), tuple(segments)))
        row += rows
    return tuple(chunks)


def _slots(tables: Tensor, key: Tensor, last: Tensor, block_size: int) -> Tensor:
    """Slots of the keys, with the last written one in place of those that come after it.

    So a slot that holds no token of the sequence is never read, whatever lies in it.

    Args:
        tables: (group, max_blocks) int32.
        key: (group, keys) positions.
        last: (group, 1), the last position that is written.
        block_size: token slots of a block.

    Returns:
        (group, keys) int64.
    """
    key = torch.minimum(key, last)
    blocks = tables.to(torch.int64).gather(1, key // block_size)
    return blocks * block_size + key % block_size


def _mask(key: Tensor, position: Tensor, window: int | None) -> Tensor:
    """0 where the row at a position sees a key and -inf where not; (rows, keys) float32."""
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
