"""Writes a plan into the staging buffer as the arrays that the device reads in one step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.plan import sampling_rows
from appliance.engine.run.staging import StepShape
from appliance.kernels.ragged import AdapterRows, RaggedBatch, SealedSpans, cut_at_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.plan import Plan, ScheduledSequence
    from appliance.engine.run.sampler import Sampler
    from appliance.engine.run.slot_settings import StepSettings
    from appliance.engine.run.staging import Staging, StepTensors
    from appliance.engine.sequence import Sequence
    from appliance.model.adapters.slots import AdapterSlots


@dataclass(frozen=True, slots=True)
class Spare:
    """Memory that nobody reads, where padding rows write."""

    block: int
    open_page: int | None = None  # only with a sealed cache
    state_slot: int | None = None  # only with recurrent layers


@dataclass(frozen=True, slots=True)
class Geometry:
    """Maps rows to sequences, on the host; padding included.

    With a sealed cache an entry that spans several blocks is as many sequences, see `RaggedBatch`.
    """

    query_lens: Sequences[int]
    context_lens: Sequences[int]
    block_tables: Sequences[array[int]]  # of the sequences, covering at least their contexts
    block_size: int  # token slots
    padding: int = 0  # number of padding sequences at the end
    open_pages: Sequences[int] | None = None  # with a sealed cache: each one's open page
    state_slots: Sequences[int] | None = None  # with recurrent layers: each one's slot
    adapter_slots: Sequences[int] | None = None  # each one's, below 0: none; None if nobody has one

    @classmethod
    def of(
        cls,
        plan: Plan,
        block_size: int,
        spare: Spare | None = None,
        padding: int = 0,
        *,
        may_adapt: bool = False,
    ) -> Geometry:
        """Lay out a plan's entries, followed by padding sequences of one token in the spare block.

        In the plan, entries with a single row come first. With `may_adapt` some of their requests
        may have adapters.
        """
        assert spare is not None or not padding
        query_lens = [entry.num_tokens for entry in plan.scheduled]
        context_lens = [entry.start + entry.num_tokens for entry in plan.scheduled]
        tables = [entry.sequence.block_table for entry in plan.scheduled]
        open_pages = state_slots = None
        adapter_slots = _adapter_slots(plan) if may_adapt else None
        if plan.states is not None:
            state_slots = [StateSlots.row(entry.sequence) for entry in plan.scheduled]
        if plan.open_pages is not None:
            query_lens, context_lens, tables, open_pages = cut_at_blocks(
                query_lens, context_lens, tables, plan.open_pages, block_size
            )
            if state_slots is not None:
                pieces = zip(state_slots, plan.open_pages, strict=True)
                state_slots = [slot for slot, pages in pieces for _ in pages]
            if adapter_slots is not None:
                pieces = zip(adapter_slots, plan.open_pages, strict=True)
                adapter_slots = [slot for slot, pages in pieces for _ in pages]
        if spare is not None:
            query_lens += [1] * padding
            context_lens += [1] * padding
            tables += [array("i", (spare.block,))] * padding
            if spare.open_page is not None:
                assert open_pages is not None or not plan.scheduled
                open_pages = [*(open_pages or ()), *([spare.open_page] * padding)]
            if spare.state_slot is not None:
                state_slots = [*(state_slots or ()), *([spare.state_slot] * padding)]
        return cls(
            *(query_lens, context_lens, tables, block_size),
            *(padding, open_pages, state_slots, adapter_slots),
        )

    def ragged(
        self, tensors: StepTensors, block_tables: Tensor, adapters: AdapterSlots | None = None
    ) -> RaggedBatch:
        """Combine it with the step's tensors on the device, and with the executor's adapters."""
        num_decodes = next(
            (i for i, rows in enumerate(self.query_lens) if rows > 1), len(self.query_lens)
        )
        return RaggedBatch(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=block_tables,
            slot_mapping=tensors.slot_mapping,
            num_decodes=num_decodes,
            host_query_lens=tuple(self.query_lens),
            host_context_lens=tuple(self.context_lens),
            sealed=self._sealed(tensors),
            state_slots=tensors.state_slots,
            host_state_slots=None if self.state_slots is None else tuple(self.state_slots),
            adapters=self._adapters(tensors, adapters),
        )

    def _adapters(self, tensors: StepTensors, table: AdapterSlots | None) -> AdapterRows | None:
        if self.adapter_slots is None:
            return None
        assert tensors.adapter_slots is not None
        assert table is not None
        return AdapterRows(tensors.adapter_slots, tuple(self.adapter_slots), table)

    def _sealed(self, tensors: StepTensors) -> SealedSpans | None:
        if self.open_pages is None:
            return None
        assert tensors.sealed_lens is not None
        assert tensors.open_tables is not None
        assert tensors.moves is not None
        size = self.block_size
        return SealedSpans(
            lens=tensors.sealed_lens,
            open_tables=tensors.open_tables.unsqueeze(1),
            host_lens=tuple((context - 1) // size * size for context in self.context_lens),
            host_open_tables=tuple((page,) for page in self.open_pages),
            slot_mapping=tensors.open_slots,
            moves=tensors.moves.view(-1, 2),
        )


def _adapter_slots(plan: Plan) -> list[int] | None:
    """Return the slot of each entry's adapter, below 0 without one; None if nobody has one."""
    if not has_adapters(plan):
        return None
    adapters = [entry.sequence.request.adapter for entry in plan.scheduled]
    return [-1 if adapter is None else adapter.slot for adapter in adapters]


def has_adapters(plan: Plan) -> bool:
    """Return True if any sequence has an adapter."""
    return any(entry.sequence.request.adapter for entry in plan.scheduled)


def is_decode(plan: Plan) -> bool:
    """Return True if every sequence has one row and samples."""
    return all(entry.num_tokens == 1 and entry.samples for entry in plan.scheduled)


def shape_of(scheduled: Sequences[ScheduledSequence], geometry: Geometry) -> StepShape:
    """Return the sizes of the step; padding rows have sampling settings too."""
    return StepShape(
        num_tokens=sum(geometry.query_lens),
        num_seqs=len(geometry.query_lens),
        num_samples=geometry.padding
        + sum([1 + len(entry.drafts) for entry in scheduled if entry.samples]),
        table_width=max(map(len, geometry.block_tables)),
        is_sealed=geometry.open_pages is not None,
        is_recurrent=geometry.state_slots is not None,
        is_adapted=geometry.adapter_slots is not None,
    )


def stage(
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    staging: Staging,
    sampler: Sampler,
    places: Mapping[Sequence, int],
) -> tuple[StepShape, StepSettings]:
    """Write a step into the staging buffer.

    Args:
        geometry: of these.
        places: where the step before put the token of each sequence that follows it.

    Returns:
        Sizes of the step, and the sampling settings of each row that samples.
    """
    shape = shape_of(scheduled, geometry)
    arrays = staging.arrays(shape)
    _fill(arrays, scheduled, geometry, places, len(staging.latest))
    return shape, sampler.stage(sampling_rows(scheduled), arrays)


def _fill(
    arrays: Mapping[str, NDArray[Any]],
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    places: Mapping[Sequence, int],
    first_source: int,
) -> None:
    """Write everything but sampling settings; `first_source` is the source of the first row."""
    num_tokens = len(arrays["token_ids"])
    token_ids: list[int] = []
    sample_rows: list[int] = []
    arrays["sources"][:] = counting(num_tokens)
    arrays["sources"] += first_source
    following: list[int] = []
    sources: list[int] = []
    for sequence, start, rows, samples, follows, _, drafts in scheduled:
        if follows:
            following.append(len(token_ids))
            sources.append(places[sequence])
            token_ids.append(0)
        elif rows == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + rows - len(drafts)]
            token_ids += drafts
        if samples:
            sample_rows += range(len(token_ids) - 1 - len(drafts), len(token_ids))
    if following:
        arrays["sources"][following] = sources
    num_filled = len(token_ids)
    arrays["token_ids"][:num_filled] = token_ids
    arrays["token_ids"][num_filled:] = 0
    arrays["sample_rows"][:] = [*sample_rows, *range(num_filled, num_tokens)]
    _fill_places(arrays, geometry, num_filled)


def _fill_places(arrays: Mapping[str, NDArray[Any]], geometry: Geometry, num_filled: int) -> None:
    """Write positions and slots; sequences from `num_filled` on are padding."""
    size, num_tokens = geometry.block_size, len(arrays["token_ids"])
    contexts = np.array(geometry.context_lens)
    num_seqs = len(contexts)
    arrays["context_lens"][:] = contexts
    tables = arrays["block_tables"].reshape(num_seqs, -1)
    _fill_tables(tables, geometry.block_tables)
    owners, positions = counting(num_seqs), arrays["positions"]
    if num_seqs == num_tokens:
        arrays["query_start"][:] = counting(num_seqs + 1)
        np.subtract(contexts, 1, out=positions)
    else:
        rows = np.array(geometry.query_lens)
        ends = rows.cumsum()
        arrays["query_start"][0] = 0
        arrays["query_start"][1:] = ends
        owners = np.repeat(owners, rows)
        np.add(counting(num_tokens), (contexts - ends)[owners], out=positions)
    blocks, offsets = np.divmod(positions, size)
    if num_filled < num_tokens:
        # Padding rows have different slots, up to the number of slots in a block.
        offsets[num_filled:] = counting(num_tokens - num_filled) % size
    slots = arrays["slot_mapping"]
    slots[:] = tables[owners, blocks]
    slots *= size
    slots += offsets
    if geometry.state_slots is not None:
        arrays["state_slots"][:] = geometry.state_slots
    if geometry.adapter_slots is not None:
        arrays["adapter_slots"][:] = geometry.adapter_slots
    if geometry.open_pages is None:
        return
    pages = np.array(geometry.open_pages)
    arrays["sealed_lens"][:] = (contexts - 1) // size * size
    arrays["open_tables"][:] = pages
    arrays["open_slots"][:] = pages[owners] * size + offsets
    # The blocks that the step fills.
    last = tables[counting(num_seqs), (contexts - 1) // size]
    moves = np.stack((pages, last), axis=1)
    moves[contexts % size > 0] = -1
    arrays["moves"].reshape(-1, 2)[:] = moves


def _fill_tables(tables: NDArray[Any], block_tables: Sequences[array[int]]) -> None:
    """Write block tables (num_seqs, table_width), padded with zeros."""
    found = np.frombuffer(b"".join(block_tables), dtype=np.int32)
    if len(found) == tables.size:
        tables.reshape(-1)[:] = found
        return
    lengths = np.array([len(table) for table in block_tables])
    tables[:] = 0
    present = counting(tables.shape[1]) < lengths[:, None]
    tables[present] = found


def counting(count: int) -> NDArray[np.int64]:
    """Return (count,) 0, 1, 2, ...; shared, so do not write to it."""
    return _counting(1 << count.bit_length())[:count]


@lru_cache
def _counting(count: int) -> NDArray[np.int64]:
    return np.arange(count)
