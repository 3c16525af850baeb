"""The rows of a step that pass through each sequence's recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from appliance.kernels.recurrence.variant import FEWEST_CHUNKED
from appliance.kernels.rows.host_spans import HostSpans

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.rows.host_spans import SpanRows
    from appliance.kernels.rows.ragged import RaggedBatch


class StateChunks(NamedTuple):
    """The chunks that rows of long spans are cut into; short spans have none."""

    spans: Tensor  # (num_chunks,) int64, the span of each
    starts: Tensor  # (num_spans,) int64, the first chunk of each
    are_all: bool  # every span has chunks


@dataclass(frozen=True, slots=True)
class StateSpans:
    """The rows of each sequence in a step, side by side, and the slot of its state.

    A sequence whose rows begin at position 0 starts from zeros, whatever its slot holds; others go
    on from their slots. The state after the last row goes back to the slot.
    """

    slots: Tensor  # (num_spans,) int64
    goes_on: Tensor  # (num_spans,) bool, False where a sequence begins
    firsts: Tensor  # (num_spans,) int64, the first row; spans are in the order of their rows
    lens: Tensor  # (num_spans,) int64, rows
    longest: int  # no span has more rows
    num_rows: int  # of the step; in a padded one the last may be in no span
    chunks: StateChunks | None = None  # None where no span is long

    @classmethod
    def of(cls, batch: RaggedBatch) -> StateSpans:
        """Return a step's spans; those of a padded step without a number of the host."""
        if batch.span_rows is not None:
            return cls._padded(batch.span_rows, len(batch.slot_mapping), batch.num_decodes)
        assert batch.host_state_slots is not None, "the batch names no state slots"
        found = HostSpans.of(batch.host_state_slots, batch.host_query_lens, batch.host_context_lens)
        of_chunks, starts = found.chunks()
        device = batch.query_start.device

        def sent(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device)

        chunks = None
        if len(of_chunks):
            are_all = bool((found.lens >= FEWEST_CHUNKED).all())
            chunks = StateChunks(sent(of_chunks), sent(starts), are_all)
        return cls(
            slots=sent(found.slots),
            goes_on=sent(found.goes_on),
            firsts=sent(found.firsts),
            lens=sent(found.lens),
            longest=int(found.lens.max()),
            num_rows=len(batch.slot_mapping),
            chunks=chunks,
        )

    @classmethod
    def _padded(cls, rows: SpanRows, num_rows: int, num_decodes: int) -> StateSpans:
        chunks = StateChunks(rows.chunk_spans, rows.chunk_starts, are_all=False)
        return cls(
            slots=rows.span_slots,
            goes_on=rows.span_goes_on,
            firsts=rows.span_firsts,
            lens=rows.span_lens,
            longest=max(1, num_rows - num_decodes),
            num_rows=num_rows,
            chunks=chunks if len(rows.chunk_spans) else None,
        )

    def side_by_side(self, x: Tensor) -> Tensor:
        """Lay rows (num_rows, ...) out as (num_spans, longest, ...), zero-padded."""
        places = torch.arange(self.longest, device=x.device)
        is_row = places < self.lens.unsqueeze(1)
        rows = torch.where(is_row, self.firsts.unsqueeze(1) + places, 0)
        return torch.where(is_row.view(*is_row.shape, *(1,) * (x.dim() - 1)), x[rows], 0)

    def in_turn(self, x: Tensor) -> Tensor:
        """Undo `side_by_side` without waiting for the device; rows in no span get anything."""
        rows = torch.arange(self.num_rows, device=x.device)
        span = torch.searchsorted(self.lens.cumsum(0), rows, right=True)
        span = span.clamp(max=len(self.lens) - 1)
        place = (rows - self.firsts[span]).clamp(0, self.longest - 1)
        return x.flatten(0, 1)[span * self.longest + place]

    def read(self, state: Tensor) -> Tensor:
        """Read the states (num_slots, ...) that the spans start from: (num_spans, ...), widened."""
        goes_on = self.goes_on.view(-1, *(1,) * (state.dim() - 1))
        wide = torch.promote_types(state.dtype, torch.float32)
        return torch.where(goes_on, state[self.slots], 0).to(wide)

    def write(self, state: Tensor, value: Tensor) -> None:
        """Write the states after the spans' last rows, (num_spans, ...), back to their slots.

        They are rounded to the slots' type; what exceeds float16 becomes its largest number.
        """
        if state.dtype == torch.float16:
            most = torch.finfo(state.dtype).max
            value = value.clamp(-most, most)
        state[self.slots] = value.to(state.dtype)
