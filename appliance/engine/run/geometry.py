"""Maps a plan's rows to sequences, with padding for steps with a graph; sizes the largest step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.run.cuda_graphs import step_sizes
from appliance.engine.run.staging import StepShape
from appliance.kernels.attention.work import TILE_ROWS
from appliance.kernels.rows.host_spans import most_chunks
from appliance.kernels.rows.ragged import AdapterRows, RaggedBatch, SealedSpans, cut_at_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from torch import Tensor

    from appliance.engine.nouns.limits import SchedulerLimits
    from appliance.engine.nouns.plan import Plan
    from appliance.engine.run.cuda_graphs import StepSize
    from appliance.engine.run.staging import StepTensors
    from appliance.kernels.rows.ragged import GivenRows
    from appliance.model.adapters.adapter import AdapterSlots


@dataclass(frozen=True, slots=True)
class Spare:
    """Memory for the writes of padding rows; never read."""

    block: int
    open_block: int | None = None  # with a sealed cache
    state_slot: int | None = None  # with recurrent layers


@dataclass(frozen=True, slots=True)
class Geometry:
    """Maps rows to sequences, on the host; padding included.

    With a sealed cache an entry that spans several blocks becomes several sequences, see
    `RaggedBatch`. A padded step has one-token sequences in the spare block after the single rows,
    and at the end sequences without rows and rows without a sequence; one with drafts has only
    those.

    Attributes:
        query_lens: rows of each sequence.
        block_tables: each sequence's, covering at least its context.
        block_size: token slots.
        num_decodes: leading sequences with one row, or with up to `size.rows_each`.
        has_drafts: rows verify drafts, which may follow those of prompts.
        has_axes: rows rotate by positions in time, height and width.
        padding: number of padding sequences with a row, the last of these.
        spare: of a padded step.
        size: the padded size.
    """

    query_lens: Sequences[int]
    context_lens: Sequences[int]
    block_tables: Sequences[array[int]]
    block_size: int
    num_rows: int
    num_decodes: int
    padding: int = 0
    spare: Spare | None = None
    size: StepSize | None = None
    open_blocks: Sequences[int] | None = None  # with a sealed cache
    state_slots: Sequences[int] | None = None  # with recurrent layers
    adapter_slots: Sequences[int] | None = None  # negative without one; None if no sequence has one
    has_drafts: bool = False
    has_axes: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        block_size: int,
        spare: Spare | None = None,
        size: StepSize | None = None,
        *,
        may_adapt: bool = False,
        has_axes: bool = False,
        sees_pictures: bool = False,
    ) -> Geometry:
        """Lay out a plan's entries, padded to a size with the spare block.

        Entries with a single row come first in the plan.

        Args:
            may_adapt: requests may have adapters.
            sees_pictures: rows of prompts see rows behind them; of an unpadded step.
        """
        query_lens = [entry.num_tokens for entry in plan.scheduled]
        context_lens = [entry.start + entry.num_tokens for entry in plan.scheduled]
        tables = [entry.sequence.block_table for entry in plan.scheduled]
        open_blocks = state_slots = None
        adapter_slots = _adapter_slots(plan) if may_adapt else None
        if plan.states is not None:
            state_slots = [StateSlots.row(entry.sequence) for entry in plan.scheduled]
        if plan.open_blocks is not None:
            query_lens, context_lens, tables, open_blocks = cut_at_blocks(
                query_lens, context_lens, tables, plan.open_blocks, block_size
            )
            if state_slots is not None:
                pieces = zip(state_slots, plan.open_blocks, strict=True)
                state_slots = [slot for slot, opened in pieces for _ in opened]
            if adapter_slots is not None:
                pieces = zip(adapter_slots, plan.open_blocks, strict=True)
                adapter_slots = [slot for slot, opened in pieces for _ in opened]
        num_decodes = next((i for i, rows in enumerate(query_lens) if rows > 1), len(query_lens))
        if sees_pictures:  # a piece of a prompt with one row decodes nothing
            assert size is None
            num_decodes = plan.num_single_rows
        if size is None:
            return cls(
                query_lens,
                context_lens,
                tables,
                block_size=block_size,
                num_rows=sum(query_lens),
                num_decodes=num_decodes,
                open_blocks=open_blocks,
                state_slots=state_slots,
                adapter_slots=adapter_slots,
                has_drafts=any(entry.drafts for entry in plan.scheduled),
                has_axes=has_axes,
            )
        assert spare is not None
        assert size.is_adapted or adapter_slots is None
        singles = plan.num_single_rows
        padding = 0 if size.draft_rows else size.num_singles - singles
        room = size.num_prompts(None if spare.open_block is None else block_size)
        empty = size.num_singles + room - padding - len(query_lens)
        assert padding >= 0, (size, singles)
        assert empty >= 0, (size, len(query_lens))

        def pad(values: list[Any], value: Any, end: Any) -> list[Any]:
            return [*values[:singles], *[value] * padding, *values[singles:], *[end] * empty]

        table = array("i", (spare.block,))
        if spare.open_block is not None:
            open_blocks = pad(open_blocks or [], spare.open_block, spare.open_block)
        if spare.state_slot is not None:
            state_slots = pad(state_slots or [], spare.state_slot, spare.state_slot)
        if size.is_adapted:
            adapter_slots = pad(adapter_slots or [], -1, -1)
        return cls(
            pad(query_lens, 1, 0),
            pad(context_lens, 1, 0),
            pad(tables, table, table),
            block_size=block_size,
            num_rows=size.num_rows,
            num_decodes=size.num_singles,
            padding=padding,
            spare=spare,
            size=size,
            open_blocks=open_blocks,
            state_slots=state_slots,
            adapter_slots=adapter_slots,
            has_drafts=size.draft_rows > 0,
            has_axes=has_axes,
        )

    @property
    def is_decode(self) -> bool:
        return self.num_rows == self.num_decodes

    @property
    def prompts_from(self) -> int | None:
        """See `RaggedBatch`: behind the single rows, unless rows verify drafts."""
        return None if self.is_decode or self.has_drafts else self.num_decodes

    @property
    def num_tiles(self) -> int:
        """Room for prompt tiles in a padded step; an unpadded one lays tiles out when it runs."""
        if self.size is None or self.is_decode:
            return 0
        return len(self.query_lens) - self.num_decodes + self.size.prompt_rows // TILE_ROWS

    @property
    def num_spans(self) -> int:
        """Room for spans of rows through states in a padded step: one for each sequence."""
        return 0 if self.size is None or self.state_slots is None else self.size.num_samples

    @property
    def num_chunks(self) -> int:
        """Room for the chunks of these spans; single rows have none."""
        if not self.num_spans or self.is_decode:
            return 0
        assert self.size is not None
        return most_chunks(self.size.prompt_rows, self.num_spans - self.num_decodes)

    def ragged(
        self,
        tensors: StepTensors,
        block_tables: Tensor,
        adapters: AdapterSlots | None = None,
        given: GivenRows | None = None,
        sees: Tensor | None = None,
    ) -> RaggedBatch:
        """Combine it with the step's tensors on the device, and the executor's adapters."""
        return RaggedBatch(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=block_tables,
            slot_mapping=tensors.slot_mapping,
            num_decodes=self.num_decodes,
            decode_rows=1 if self.size is None else self.size.rows_each,
            host_query_lens=tuple(self.query_lens),
            host_context_lens=tuple(self.context_lens),
            sealed=self._sealed(tensors),
            state_slots=tensors.state_slots,
            host_state_slots=None if self.state_slots is None else tuple(self.state_slots),
            adapters=self._adapters(tensors, adapters),
            prefill_tiles=None if tensors.tiles is None else tensors.tiles.view(-1, 2),
            span_rows=tensors.spans,
            prompts_from=self.prompts_from,
            given=given,
            axes=None if tensors.axes is None else tensors.axes.view(3, -1),
            sees=sees,
        )

    def _adapters(self, tensors: StepTensors, table: AdapterSlots | None) -> AdapterRows | None:
        if self.adapter_slots is None:
            return None
        assert tensors.adapter_slots is not None
        assert table is not None
        return AdapterRows(tensors.adapter_slots, tuple(self.adapter_slots), table)

    def _sealed(self, tensors: StepTensors) -> SealedSpans | None:
        if self.open_blocks is None:
            return None
        assert tensors.sealed_lens is not None
        assert tensors.open_tables is not None
        assert tensors.moves is not None
        size = self.block_size
        return SealedSpans(
            lens=tensors.sealed_lens,
            open_tables=tensors.open_tables.unsqueeze(1),
            host_lens=tuple(max(context - 1, 0) // size * size for context in self.context_lens),
            host_open_tables=tuple((block,) for block in self.open_blocks),
            slot_mapping=tensors.open_slots,
            moves=tensors.moves.view(-1, 2),
        )


def _adapter_slots(plan: Plan) -> list[int] | None:
    """Return each entry's adapter slot, negative without one; None if no entry has one."""
    if not has_adapters(plan):
        return None
    adapters = [entry.sequence.request.adapter for entry in plan.scheduled]
    return [-1 if adapter is None else adapter.slot for adapter in adapters]


def has_adapters(plan: Plan) -> bool:
    return any(entry.sequence.request.adapter for entry in plan.scheduled)


def largest_step(
    limits: SchedulerLimits,
    block_size: int,
    *,
    is_sealed: bool,
    is_recurrent: bool = False,
    is_padded: bool = True,
    is_adapted: bool = False,
    has_axes: bool = False,
) -> StepShape:
    """Return the sizes of the largest step, with tables for all blocks of a context.

    Args:
        is_padded: a step may be padded, to more rows than are scheduled at most.
    """
    rows, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    width = -(-limits.context_length // block_size)
    # Then entries are cut at blocks, and each piece has its own open block.
    pieces = num_open_blocks(num_seqs, rows, block_size) if is_sealed else num_seqs
    num_samples, tiles, spans = limits.sample_rows, 0, 0
    if is_padded:
        sizes = step_sizes(limits, is_recurrent=is_recurrent)
        cut = block_size if is_sealed else None
        pieces = max(pieces, *(size.num_singles + size.num_prompts(cut) for size in sizes))
        num_samples = max(num_samples, *(size.num_samples for size in sizes))
        rows = max(rows, *(size.num_rows for size in sizes))
        tiles = pieces + rows // TILE_ROWS
        spans = num_samples if is_recurrent else 0
    return StepShape(
        num_tokens=rows,
        num_seqs=pieces,
        num_samples=num_samples,
        table_width=width,
        is_sealed=is_sealed,
        is_recurrent=is_recurrent,
        is_adapted=is_adapted,
        num_tiles=tiles,
        num_spans=spans,
        num_chunks=most_chunks(rows, spans) if spans else 0,
        has_axes=has_axes,
    )


def fixed_bytes(largest: StepShape, vocab_size: int) -> int:
    """Return the fixed device memory: inputs, tables, logits, token counts."""
    tables = 4 * largest.num_seqs * largest.table_width
    return largest.num_bytes + tables + largest.num_samples * (16 + 8 * vocab_size)
