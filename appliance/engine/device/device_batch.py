"""A plan as arrays in the staging buffer: what the device reads in one step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.device.staging import StepShape
from appliance.kernels.ragged import RaggedBatch, SealedSpans, cut_at_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.device.staging import StepTensors
    from appliance.engine.plan import Plan, ScheduledSequence
    from appliance.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Spare:
    """Where rows write that only fill up a batch: memory that nobody reads."""

    block: int
    open_page: int | None = None  # with a sealed cache only


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which rows belong to which sequence, on the host; those that fill a batch up included.

    With a sealed cache an entry that spans several blocks is as many sequences, see `RaggedBatch`.
    """

    query_lens: Sequences[int]
    context_lens: Sequences[int]
    block_tables: Sequences[array[int]]  # the sequences' own: at least the blocks of their context
    block_size: int  # token slots
    padding: int = 0  # sequences at the end that only fill up
    open_pages: Sequences[int] | None = None  # with a sealed cache: where each one's rows go

    @classmethod
    def of(cls, plan: Plan, block_size: int, padding: int, spare: Spare) -> Geometry:
        """Lay entries side by side, and sequences of one token in the spare block behind them.

        Args:
            plan: entries with a single row first.
            block_size: token slots in a block.
            padding: how many sequences are to be added.
            spare: where those lie.
        """
        query_lens = [entry.num_tokens for entry in plan.scheduled]
        context_lens = [entry.start + entry.num_tokens for entry in plan.scheduled]
        tables = [entry.sequence.block_table for entry in plan.scheduled]
        open_pages = None
        if spare.open_page is not None:
            assert plan.open_pages is not None or not plan.scheduled
            query_lens, context_lens, tables, pages = cut_at_blocks(
                query_lens, context_lens, tables, plan.open_pages or (), block_size
            )
            open_pages = pages + [spare.open_page] * padding
        return cls(
            query_lens=query_lens + [1] * padding,
            context_lens=context_lens + [1] * padding,
            block_tables=tables + [array("i", (spare.block,))] * padding,
            block_size=block_size,
            padding=padding,
            open_pages=open_pages,
        )

    def ragged(self, tensors: StepTensors, block_tables: Tensor) -> RaggedBatch:
        """With what lies on the device already."""
        size = self.block_size
        num_decodes = next(
            (i for i, rows in enumerate(self.query_lens) if rows > 1), len(self.query_lens)
        )
        tables = zip(self.block_tables, self.context_lens, strict=True)
        return RaggedBatch(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=block_tables,
            slot_mapping=tensors.slot_mapping,
            num_decodes=num_decodes,
            host_query_lens=tuple(self.query_lens),
            host_context_lens=tuple(self.context_lens),
            host_block_tables=tuple(tuple(table[: -(-end // size)]) for table, end in tables),
            sealed=self._sealed(tensors),
        )

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


def is_decode(plan: Plan) -> bool:
    """Whether every sequence has one row and samples."""
    return all(entry.num_tokens == 1 and entry.samples for entry in plan.scheduled)


def shape_of(scheduled: Sequences[ScheduledSequence], geometry: Geometry) -> StepShape:
    """Sizes of the step; decode rows that fill it up have settings for sampling too."""
    return StepShape(
        num_tokens=sum(geometry.query_lens),
        num_seqs=len(geometry.query_lens),
        num_samples=geometry.padding + sum([entry.samples for entry in scheduled]),
        table_width=max(map(len, geometry.block_tables)),
        is_sealed=geometry.open_pages is not None,
    )


def fill(
    arrays: Mapping[str, NDArray[Any]],
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    places: Mapping[Sequence, int],
    first_source: int,
) -> None:
    """Write a step into its staging arrays, what its sampling needs excepted.

    Args:
        arrays: of the step's shape.
        scheduled: the plan's entries.
        geometry: of these.
        places: where the step before put the token of each sequence that follows it.
        first_source: source of the first row, if its token is known.
    """
    num_tokens = len(arrays["token_ids"])
    token_ids: list[int] = []
    sample_rows: list[int] = []
    arrays["sources"][:] = np.arange(first_source, first_source + num_tokens)
    following: list[int] = []
    sources: list[int] = []
    for sequence, start, rows, samples, follows in scheduled:
        if follows:
            following.append(len(token_ids))
            sources.append(places[sequence])
            token_ids.append(0)
        elif rows == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + rows]
        if samples:
            sample_rows.append(len(token_ids) - 1)
    arrays["sources"][following] = sources
    num_filled = len(token_ids)
    arrays["token_ids"][:num_filled] = token_ids
    arrays["token_ids"][num_filled:] = 0
    arrays["sample_rows"][:] = [*sample_rows, *range(num_filled, num_tokens)]
    _fill_places(arrays, geometry, num_filled)


def _fill_places(arrays: Mapping[str, NDArray[Any]], geometry: Geometry, num_filled: int) -> None:
    """Write where the rows stand in their sequences and in the cache; behind `num_filled` spare."""
    size, num_tokens = geometry.block_size, len(arrays["token_ids"])
    rows, contexts = np.array(geometry.query_lens), np.array(geometry.context_lens)
    ends = rows.cumsum()
    arrays["query_start"][0] = 0
    arrays["query_start"][1:] = ends
    arrays["context_lens"][:] = contexts
    tables = arrays["block_tables"].reshape(len(rows), -1)
    _fill_tables(tables, geometry.block_tables)
    if len(rows) == num_tokens:
        owners, positions = np.arange(num_tokens), contexts - 1
    else:
        owners = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(num_tokens) + (contexts - ends)[owners]
    offsets = positions % size
    # Of the rows that only fill up no two have the same slot, as long as a block has as many.
    offsets[num_filled:] = np.arange(num_tokens - num_filled) % size
    arrays["positions"][:] = positions
    slots = arrays["slot_mapping"]
    slots[:] = tables[owners, positions // size]
    slots *= size
    slots += offsets
    if geometry.open_pages is None:
        return
    pages = np.array(geometry.open_pages)
    arrays["sealed_lens"][:] = (contexts - 1) // size * size
    arrays["open_tables"][:] = pages
    arrays["open_slots"][:] = pages[owners] * size + offsets
    # Which blocks the step fills.
    last = tables[np.arange(len(rows)), (contexts - 1) // size]
    moves = np.stack((pages, last), axis=1)
    moves[contexts % size > 0] = -1
    arrays["moves"].reshape(-1, 2)[:] = moves


def _fill_tables(tables: NDArray[Any], block_tables: Sequences[array[int]]) -> None:
    """Write block tables (num_seqs, table_width), each with zeros behind it."""
    lengths = np.array([len(table) for table in block_tables])
    tables[:] = 0
    present = np.arange(tables.shape[1]) < lengths[:, None]
    tables[present] = np.frombuffer(b"".join(block_tables), dtype=np.int32)
