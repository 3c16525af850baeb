"""The rows of a step that pass through each sequence's recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from appliance.kernels.recurrence.variant import CHUNK, FEWEST_CHUNKED

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class StateChunks:
    """The chunks that rows of long spans are cut into; short spans have none."""

    spans: Tensor  # (num_chunks,) int64, the span of each
    starts: Tensor  # (num_spans,) int64, the first chunk of each
    are_all: bool  # every span has chunks

    @classmethod
    def of(cls, lens: list[int], device: torch.device) -> StateChunks | None:
        """Cut spans of so many rows; None if all are short."""
        counts = [-(-rows // CHUNK) if rows >= FEWEST_CHUNKED else 0 for rows in lens]
        if not any(counts):
            return None
        spans = [span for span, count in enumerate(counts) for _ in range(count)]
        return cls(
            spans=torch.tensor(spans, device=device),
            starts=torch.tensor([0, *accumulate(counts)][:-1], device=device),
            are_all=all(counts),
        )


@dataclass(frozen=True, slots=True)
class StateSpans:
    """The rows of each sequence in a step, side by side, and the slot of its state.

    A sequence whose rows begin at position 0 starts from zeros, whatever its slot holds; others go
    on from their slots. The state after the last row goes back to the slot.
    """

    slots: Tensor  # (num_spans,) int64
    goes_on: Tensor  # (num_spans,) bool, False where a sequence begins
    lens: Tensor  # (num_spans,) int64, rows
    rows: Tensor  # (num_spans, longest) int64, the row at each place; 0 after a span's last
    is_row: Tensor  # (num_spans, longest) bool
    places: Tensor  # (num_tokens,) int64, the place of each row among all spans'
    chunks: StateChunks | None = None  # None where no span is long

    @classmethod
    def of(cls, batch: RaggedBatch) -> StateSpans:
        """Find the spans; the pieces of a sequence that sealed blocks cut are joined again."""
        if batch.is_decode:
            return cls._of_decode(batch)
        assert batch.host_state_slots is not None, "the batch names no state slots"
        slots: list[int] = []
        lens: list[int] = []
        goes_on: list[bool] = []
        parts = zip(
            batch.host_state_slots, batch.host_query_lens, batch.host_context_lens, strict=True
        )
        for slot, rows, context in parts:
            if slots and slots[-1] == slot:
                lens[-1] += rows
                continue
            slots.append(slot)
            lens.append(rows)
            goes_on.append(context > rows)
        device = batch.query_start.device
        counts = torch.tensor(lens, device=device)
        starts = torch.tensor([0, *accumulate(lens)][:-1], device=device)
        places = torch.arange(max(lens), device=device)
        is_row = places < counts.unsqueeze(1)
        longest = max(lens)
        taken = [span * longest + row for span, count in enumerate(lens) for row in range(count)]
        return cls(
            slots=torch.tensor(slots, device=device),
            goes_on=torch.tensor(goes_on, device=device),
            lens=counts,
            rows=torch.where(is_row, starts.unsqueeze(1) + places, 0),
            is_row=is_row,
            places=torch.tensor(taken, device=device),
            chunks=StateChunks.of(lens, device),
        )

    @classmethod
    def _of_decode(cls, batch: RaggedBatch) -> StateSpans:
        """Make each row a span, from what lies on the device, so that a graph can capture it."""
        assert batch.state_slots is not None, "the batch names no state slots"
        slots = batch.state_slots.long()
        rows = torch.arange(len(slots), device=slots.device)
        return cls(
            slots=slots,
            goes_on=batch.context_lens > 1,
            lens=torch.ones_like(slots),
            rows=rows.unsqueeze(1),
            is_row=torch.ones_like(rows, dtype=torch.bool).unsqueeze(1),
            places=rows,
        )

    def side_by_side(self, x: Tensor) -> Tensor:
        """Lay rows (num_tokens, ...) out as (num_spans, longest, ...), zero-padded."""
        is_row = self.is_row.view(*self.is_row.shape, *(1,) * (x.dim() - 1))
        return torch.where(is_row, x[self.rows], 0)

    def in_turn(self, x: Tensor) -> Tensor:
        """Undo `side_by_side`, without waiting for the device."""
        return x.flatten(0, 1)[self.places]

    def read(self, state: Tensor) -> Tensor:
        """Read the states (num_slots, ...) that the spans start from: (num_spans, ...)."""
        goes_on = self.goes_on.view(-1, *(1,) * (state.dim() - 1))
        return torch.where(goes_on, state[self.slots], 0)

    def write(self, state: Tensor, value: Tensor) -> None:
        """Write the states after the spans' last rows, (num_spans, ...), back to their slots."""
        state[self.slots] = value
