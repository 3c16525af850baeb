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
from appliance.kernels.paged_attention.work import NO_TILE, TILE_ROWS, prefill_tiles
from appliance.kernels.ragged import AdapterRows, RaggedBatch, SealedSpans, cut_at_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.plan import Plan, ScheduledSequence
    from appliance.engine.run.cuda_graphs import StepSize
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
    A step that is padded has sequences of one token in the spare block behind those of one row, at
    the end sequences without rows, and rows of no sequence.

    Attributes:
        query_lens: rows of each sequence.
        block_tables: of the sequences, covering at least their contexts.
        block_size: token slots.
        num_rows: of the step.
        num_decodes: leading sequences with one row.
        padding: of these, the last ones that only pad.
        spare: of a padded step.
        size: what the step is padded to.
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
    open_pages: Sequences[int] | None = None  # with a sealed cache: each one's open page
    state_slots: Sequences[int] | None = None  # with recurrent layers: each one's slot
    adapter_slots: Sequences[int] | None = None  # each one's, below 0: none; None if nobody has one

    @classmethod
    def of(
        cls,
        plan: Plan,
        block_size: int,
        spare: Spare | None = None,
        size: StepSize | None = None,
        *,
        may_adapt: bool = False,
    ) -> Geometry:
        """Lay out a plan's entries, padded to a size with the spare block.

        In the plan, entries with a single row come first. With `may_adapt` some of their requests
        may have adapters.
        """
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
        num_decodes = next((i for i, rows in enumerate(query_lens) if rows > 1), len(query_lens))
        if size is None:
            return cls(
                *(query_lens, context_lens, tables),
                block_size=block_size,
                num_rows=sum(query_lens),
                num_decodes=num_decodes,
                open_pages=open_pages,
                state_slots=state_slots,
                adapter_slots=adapter_slots,
            )
        assert spare is not None
        assert adapter_slots is None
        singles = plan.num_single_rows
        padding = size.num_singles - singles
        room = size.num_prompts(None if spare.open_page is None else block_size)
        empty = room - (len(query_lens) - singles)
        assert padding >= 0, (size, singles)
        assert empty >= 0, (size, len(query_lens))

        def pad(values: list[Any], value: Any, end: Any) -> list[Any]:
            return [*values[:singles], *[value] * padding, *values[singles:], *[end] * empty]

        table = array("i", (spare.block,))
        if spare.open_page is not None:
            open_pages = pad(open_pages or [], spare.open_page, spare.open_page)
        if spare.state_slot is not None:
            state_slots = pad(state_slots or [], spare.state_slot, spare.state_slot)
        return cls(
            *(pad(query_lens, 1, 0), pad(context_lens, 1, 0), pad(tables, table, table)),
            block_size=block_size,
            num_rows=size.num_rows,
            num_decodes=size.num_singles,
            padding=padding,
            spare=spare,
            size=size,
            open_pages=open_pages,
            state_slots=state_slots,
        )

    @property
    def is_decode(self) -> bool:
        """True if every row is a sequence."""
        return self.num_rows == self.num_decodes

    @property
    def num_tiles(self) -> int:
        """Room for tiles of prompts in a padded step; others are laid out when they run."""
        if self.size is None or self.is_decode:
            return 0
        return len(self.query_lens) - self.num_decodes + self.size.prompt_rows // TILE_ROWS

    def ragged(
        self, tensors: StepTensors, block_tables: Tensor, adapters: AdapterSlots | None = None
    ) -> RaggedBatch:
        """Combine it with the step's tensors on the device, and with the executor's adapters."""
        return RaggedBatch(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=block_tables,
            slot_mapping=tensors.slot_mapping,
            num_decodes=self.num_decodes,
            host_query_lens=tuple(self.query_lens),
            host_context_lens=tuple(self.context_lens),
            sealed=self._sealed(tensors),
            state_slots=tensors.state_slots,
            host_state_slots=None if self.state_slots is None else tuple(self.state_slots),
            adapters=self._adapters(tensors, adapters),
            is_decode=self.size is not None and self.is_decode,
            prefill_tiles=None if tensors.tiles is None else tensors.tiles.view(-1, 2),
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
            host_lens=tuple(max(context - 1, 0) // size * size for context in self.context_lens),
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
    size = geometry.size
    return StepShape(
        num_tokens=geometry.num_rows,
        num_seqs=len(geometry.query_lens),
        num_samples=sum([1 + len(entry.drafts) for entry in scheduled if entry.samples])
        if size is None
        else size.num_samples,
        table_width=max(map(len, geometry.block_tables)),
        is_sealed=geometry.open_pages is not None,
        is_recurrent=geometry.state_slots is not None,
        is_adapted=geometry.adapter_slots is not None,
        num_tiles=geometry.num_tiles,
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
    _fill(arrays, scheduled, geometry, places, staging.first_source)
    return shape, sampler.stage(sampling_rows(scheduled), arrays)


def _fill(
    arrays: Mapping[str, NDArray[Any]],
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    places: Mapping[Sequence, int],
    first_source: int | None,
) -> None:
    """Write everything but sampling settings; `first_source` is of the first row, if any."""
    num_tokens, padding = len(arrays["token_ids"]), geometry.padding
    token_ids: list[int] = []
    sample_rows: list[int] = []
    if first_source is not None:
        np.add(counting(num_tokens), first_source, out=arrays["sources"])
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
            token_ids += [0] * padding  # behind the single rows
            padding = 0
            token_ids += sequence.token_ids[start : start + rows - len(drafts)]
            token_ids += drafts
        if samples:
            sample_rows += range(len(token_ids) - 1 - len(drafts), len(token_ids))
    if following:
        arrays["sources"][following] = sources
    num_filled = len(token_ids)
    arrays["token_ids"][:num_filled] = token_ids
    count = len(sample_rows)
    arrays["sample_rows"][:count] = sample_rows
    if geometry.size is not None:
        arrays["token_ids"][num_filled:] = 0
        arrays["sample_rows"][count:] = 0
    _fill_places(arrays, geometry)
    if geometry.num_tiles:
        tiles = prefill_tiles(geometry.query_lens, geometry.num_decodes)
        arrays["tiles"].reshape(-1, 2)[:] = NO_TILE
        arrays["tiles"][: tiles.size] = tiles.reshape(-1)


def _fill_places(arrays: Mapping[str, NDArray[Any]], geometry: Geometry) -> None:
    """Write positions and slots; rows that pad have different slots of the spare block."""
    size, num_tokens = geometry.block_size, geometry.num_rows
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
        used = len(owners)
        np.add(counting(used), (contexts - ends)[owners], out=positions[:used])
        positions[used:] = 0
    used = len(owners)
    blocks, offsets = np.divmod(positions, size)
    if geometry.padding:
        end = geometry.num_decodes
        offsets[end - geometry.padding : end] = counting(geometry.padding) % size
    if used < num_tokens:
        offsets[used:] = counting(num_tokens - used) % size
    slots = arrays["slot_mapping"]
    slots[:used] = tables[owners, blocks[:used]]
    if geometry.spare is not None:
        slots[used:] = geometry.spare.block
    slots *= size
    slots += offsets
    if geometry.state_slots is not None:
        arrays["state_slots"][:] = geometry.state_slots
    if geometry.adapter_slots is not None:
        arrays["adapter_slots"][:] = geometry.adapter_slots
    if geometry.open_pages is None:
        return
    pages = np.array(geometry.open_pages)
    lasts = np.maximum(contexts - 1, 0)
    arrays["sealed_lens"][:] = lasts // size * size
    arrays["open_tables"][:] = pages
    open_slots = arrays["open_slots"]
    open_slots[:used] = pages[owners]
    if geometry.spare is not None:
        open_slots[used:] = geometry.spare.open_page
    open_slots *= size
    open_slots += offsets
    # The blocks that the step fills.
    last = tables[counting(num_seqs), lasts // size]
    moves = np.stack((pages, last), axis=1)
    moves[(contexts % size > 0) | (contexts == 0)] = -1
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
