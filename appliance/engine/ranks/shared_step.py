"""The description of a step in shared memory: rank 0 writes it, the other ranks read it.

It holds what the CPU library reads of a step: about 100 bytes per sequence and 2 per block, or 4 in
a cache of more than 65,536 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.rows.ragged import AdapterRows, RaggedBatch, SealedSpans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.ranks.messages import Room
    from appliance.kernels.cpu.arena import Mapping

ALIGNMENT = 64  # bytes
_HEADER = 16  # int64 words
_NONE = -1


class RankOrder(IntEnum):
    """The next order for all ranks."""

    STEP = 1
    HEAD = 2
    CALL = 3  # read a message


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step as the other ranks run it."""

    token_ids: Tensor
    positions: Tensor
    batch: RaggedBatch
    rows: Tensor | None
    wants_logits: bool


class SharedStep:
    """The shared memory of one group.

    Args:
        mapping: shared by all ranks.
        begin: offset of the step's description, which the results follow.
        room: sizes of both.
    """

    def __init__(self, mapping: Mapping, begin: int, room: Room) -> None:
        whole: NDArray[Any] = np.frombuffer(mapping.memory, dtype=np.uint8)
        end = begin + room.payload_bytes
        self._bytes = whole[begin:end]
        self._answers = whole[end : end + room.answer_bytes]
        self._header = self._bytes[: 8 * _HEADER].view(np.int64)

    @property
    def order(self) -> RankOrder:
        return RankOrder(int(self._header[0]))

    def write_order(self, order: RankOrder) -> None:
        self._header[0] = order

    def write_step(self, step: RankStep) -> int:
        """Write a step's description; return its bytes."""
        batch = step.batch
        parts = (
            step.token_ids,
            step.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            step.rows,
            None if batch.sealed is None else batch.sealed.open_tables,
            batch.state_slots,
            None if batch.adapters is None else batch.adapters.slots,
        )
        width = batch.block_tables.shape[1]
        self._header[:4] = RankOrder.STEP, batch.num_seqs, width, step.wants_logits
        counts = [_NONE if part is None else part.numel() for part in parts]
        self._header[4 : 4 + len(counts)] = counts
        types = _types(is_narrow=int(batch.block_tables.max()) <= _MOST_NARROW)
        self._header[-1] = types[_TABLES].itemsize
        end = 8 * _HEADER
        for part, dtype, (begin, end) in zip(parts, types, _places(counts, types), strict=True):
            if part is not None:
                self._bytes[begin:end].view(dtype)[:] = part.contiguous().view(-1).numpy()
        return end

    def read_step(self, adapters: object | None) -> RankStep:
        """Read a step in place; `adapters` is this rank's table of slots."""
        _, num_seqs, width, wants_logits = self._header[:4].tolist()
        counts = self._header[4 : 4 + len(_TYPES)].tolist()
        types = _types(is_narrow=self._header[-1] == 2)
        views = [self._bytes[begin:end] for begin, end in _places(counts, types)]
        found: list[Tensor | None] = [
            None if count == _NONE else arrays.of_numpy(view.view(written).astype(read, copy=False))
            for count, view, written, read in zip(counts, views, types, _TYPES, strict=True)
        ]
        tokens, positions, slots, starts, contexts, tables, rows, opened, states, lora = found
        assert tokens is not None
        assert positions is not None
        assert slots is not None
        assert starts is not None
        assert contexts is not None
        assert tables is not None
        unused = (0,) * num_seqs  # only torch's executor reads what the host knows
        batch = RaggedBatch(
            query_start=starts,
            context_lens=contexts,
            block_tables=tables.view(num_seqs, width),
            slot_mapping=slots,
            num_decodes=0,
            host_query_lens=unused,
            host_context_lens=unused,
            sealed=None if opened is None else SealedSpans(contexts, opened, (), ()),
            state_slots=states,
            adapters=None if lora is None else AdapterRows(lora, (), adapters),
        )
        return RankStep(tokens, positions, batch, rows, bool(wants_logits))

    def write_hidden(self, hidden: Tensor) -> None:
        """Write rows (num_rows, hidden_size) float32 for the head."""
        self._header[:3] = RankOrder.HEAD, *hidden.shape
        end = 8 * _HEADER + hidden.nbytes
        self._bytes[8 * _HEADER : end] = hidden.contiguous().view(-1).numpy().view(np.uint8)

    def read_hidden(self) -> Tensor:
        _, rows, width = self._header[:3].tolist()
        end = 8 * _HEADER + 4 * rows * width
        values = self._bytes[8 * _HEADER : end].view(np.float32)
        found: Tensor = arrays.of_numpy(values.reshape(rows, width))
        return found

    def answers(self, first: int, count: int, width: int) -> Tensor:
        """View rows of the last stage's results, (count, width) float32."""
        begin, end = 4 * first * width, 4 * (first + count) * width
        assert end <= len(self._answers), (first, count, width)
        values = self._answers[begin:end].view(np.float32)
        found: Tensor = arrays.of_numpy(values.reshape(count, width))
        return found


_TYPES = tuple(
    map(np.dtype, (*("int64",) * 3, *("int32",) * 3, "int64", *("int32",) * 3)),
)
_TABLES = 5  # the place of block tables
_NARROW = np.dtype("uint16")
_MOST_NARROW = np.iinfo(_NARROW).max


def _types(*, is_narrow: bool) -> tuple[np.dtype[Any], ...]:
    """Return the types in which the parts are written."""
    return (*_TYPES[:_TABLES], _NARROW, *_TYPES[_TABLES + 1 :]) if is_narrow else _TYPES


def _places(counts: list[int], types: tuple[np.dtype[Any], ...]) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each part, and one after its last."""
    end = 8 * _HEADER
    for count, dtype in zip(counts, types, strict=True):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + max(count, 0) * dtype.itemsize
        yield begin, end


def payload_bytes(num_rows: int, table_width: int, hidden_size: int) -> int:
    """Return the bytes of the longest description with this many rows.

    Each row may be a sequence of its own, with a whole table. Only written pages take memory.
    """
    sizes = (*(8,) * 4, *(4,) * 5, 4 * table_width)
    step = sum(sizes) * (num_rows + 1) + len(_TYPES) * ALIGNMENT
    room = 8 * _HEADER + max(step, 4 * prod((num_rows, hidden_size)))
    return -(-room // ALIGNMENT) * ALIGNMENT
