"""Finds the keys that each row reads on the CPU, once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from appliance.kernels.rows.ragged import RaggedBatch


# Decode rows share a call if their contexts round up to the same multiple: a few padded keys cost
# less than a call.
KEY_STEP = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose padded contexts have one length: a single batched call."""

    rows: Tensor | None  # (group,) int64 rows of the step; None means the first `group` rows
    slots: Tensor  # (group * keys,) int64
    mask: Tensor  # (group, 1, 1, keys) float32, 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several rows of one sequence."""

    start: int  # rows of the step
    stop: int
    slots: Tensor  # (keys,) int64
    mask: Tensor  # (rows, keys) float32, 0 or -inf


@dataclass(frozen=True, slots=True)
class Layout:
    """All rows of a step, for layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class CpuAttentionWork:
    """Layouts that a step's layers share; the first layer that needs one builds it.

    Attributes:
        layouts: by window, and whether rows see more than the tokens up to their own.
    """

    batch: RaggedBatch
    block_size: int
    layouts: dict[tuple[int | None, bool], Layout] = field(default_factory=dict)

    def layout(self, window: int | None, sees: Tensor | None = None) -> Layout:
        """The step's rows, for layers with this window.

        Args:
            sees: (num_tokens,) int32, leading tokens that each row sees, the same for all layers.
        """
        key = window, sees is not None
        if key not in self.layouts:
            self.layouts[key] = Layout(
                groups=_decode_groups(self.batch, self.block_size, window),
                chunks=_prefill_chunks(self.batch, self.block_size, window, sees),
            )
        return self.layouts[key]


def plan_attention(batch: RaggedBatch, block_size: int) -> CpuAttentionWork:
    """Prepare a step for `cpu.paged_attention`."""
    return CpuAttentionWork(batch, block_size)


def single_rows(batch: RaggedBatch) -> int:
    """Return the leading sequences with one row each; drafts to verify count as chunks."""
    return batch.num_decodes if batch.decode_rows == 1 else 0


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _decode_groups(
    batch: RaggedBatch, block_size: int, window: int | None
) -> tuple[DecodeGroup, ...]:
    last = [context - 1 for context in batch.host_context_lens[: single_rows(batch)]]
    first = [_first_key(position, window) for position in last]
    by_length: dict[int, list[int]] = {}
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        by_length.setdefault(-(-(end + 1 - begin) // KEY_STEP) * KEY_STEP, []).append(row)
    groups = []
    for length, rows in by_length.items():
        index = torch.tensor(rows)
        key = torch.tensor([first[row] for row in rows]).unsqueeze(1) + torch.arange(length)
        position = torch.tensor([last[row] for row in rows]).unsqueeze(1)
        # Padding rereads the row's own slot: a slot without a token may hold NaN.
        slots = _slots(batch.block_tables[index], torch.minimum(key, position), block_size)
        groups.append(
            DecodeGroup(
                rows=None if len(by_length) == 1 else index,
                slots=slots.flatten(),
                mask=_mask(key, position, None).view(len(rows), 1, 1, length),
            )
        )
    return tuple(groups)


def _prefill_chunks(
    batch: RaggedBatch, block_size: int, window: int | None, sees: Tensor | None
) -> tuple[PrefillChunk, ...]:
    chunks = []
    row = single_rows(batch)
    for i in range(row, batch.num_seqs):
        rows, context = batch.host_query_lens[i], batch.host_context_lens[i]
        if not rows:  # padding
            continue
        begin = context - rows  # position of the chunk's first row
        end = context if sees is None else int(sees[row + rows - 1])
        key = torch.arange(_first_key(begin, window), end).unsqueeze(0)
        position = torch.arange(begin, context).unsqueeze(1)
        last = None if sees is None else sees[row : row + rows].unsqueeze(1) - 1
        chunks.append(
            PrefillChunk(
                start=row,
                stop=row + rows,
                slots=_slots(batch.block_tables[i : i + 1], key, block_size).flatten(),
                mask=_mask(key, position, window, last),
            )
        )
        row += rows
    return tuple(chunks)


def _slots(tables: Tensor, key: Tensor, block_size: int) -> Tensor:
    """Return slots of keys (group, keys) int64; tables are (group, max_blocks) int32."""
    blocks = tables.to(torch.int64).gather(1, key // block_size)
    return blocks * block_size + key % block_size


def _mask(key: Tensor, position: Tensor, window: int | None, last: Tensor | None = None) -> Tensor:
    """Return a float32 mask (rows, keys): 0 where the row at a position sees a key, else -inf.

    Args:
        last: (rows, 1), the last key that a row sees; None is its own.
    """
    hidden = key > (position if last is None else last)
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
