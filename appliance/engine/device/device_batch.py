"""A plan as arrays in the staging buffer: what the device reads in one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.device.device_sampler import uniform_numbers
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

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    block_size: int  # token slots
    padding: int = 0  # sequences at the end that only fill up
    open_pages: tuple[int, ...] | None = None  # with a sealed cache: where each one's rows go

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
        context_lens = [entry.end for entry in plan.scheduled]
        tables: Sequences[Sequences[int]] = [e.sequence.block_table for e in plan.scheduled]
        open_pages = None
        if spare.open_page is not None:
            assert plan.open_pages is not None or not plan.scheduled
            query_lens, context_lens, tables, pages = cut_at_blocks(
                query_lens, context_lens, tables, plan.open_pages or (), block_size
            )
            open_pages = (*pages, *(spare.open_page,) * padding)
        used = (
            tuple(table[: -(-context // block_size)])
            for table, context in zip(tables, context_lens, strict=True)
        )
        return cls(
            query_lens=(*query_lens, *(1,) * padding),
            context_lens=(*context_lens, *(1,) * padding),
            block_tables=(*used, *((spare.block,),) * padding),
            block_size=block_size,
            padding=padding,
            open_pages=open_pages,
        )

    @property
    def sealed_lens(self) -> tuple[int, ...]:
        """Leading tokens of each sequence that lie in closed blocks, if the cache is sealed."""
        size = self.block_size
        return tuple((context - 1) // size * size for context in self.context_lens)

    def ragged(self, tensors: StepTensors, block_tables: Tensor) -> RaggedBatch:
        """With what lies on the device already."""
        num_decodes = next(
            (i for i, rows in enumerate(self.query_lens) if rows > 1), len(self.query_lens)
        )
        return RaggedBatch(
            query_start=tensors.query_start,
            context_lens=tensors.context_lens,
            block_tables=block_tables,
            slot_mapping=tensors.slot_mapping,
            num_decodes=num_decodes,
            host_query_lens=self.query_lens,
            host_context_lens=self.context_lens,
            host_block_tables=self.block_tables,
            sealed=self._sealed(tensors),
        )

    def _sealed(self, tensors: StepTensors) -> SealedSpans | None:
        if self.open_pages is None:
            return None
        assert tensors.sealed_lens is not None
        assert tensors.open_tables is not None
        assert tensors.moves is not None
        return SealedSpans(
            lens=tensors.sealed_lens,
            open_tables=tensors.open_tables.unsqueeze(1),
            host_lens=self.sealed_lens,
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
        num_samples=geometry.padding + sum(entry.samples for entry in scheduled),
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
    """Write a step into its staging arrays.

    Args:
        arrays: of the step's shape.
        scheduled: the plan's entries.
        geometry: of these.
        places: where the step before put the token of each sequence that follows it.
        first_source: source of the first row, if its token is known.
    """
    num_tokens = len(arrays["token_ids"])
    token_ids: list[int] = []
    sources = list(range(first_source, first_source + num_tokens))
    sample_rows: list[int] = []
    for entry in scheduled:
        if entry.follows:
            sources[len(token_ids)] = places[entry.sequence]
            token_ids.append(0)
        else:
            token_ids += entry.sequence.token_ids[entry.start : entry.end]
        if entry.samples:
            sample_rows.append(len(token_ids) - 1)
    padding = num_tokens - len(token_ids)
    sample_rows += range(len(token_ids), num_tokens)
    arrays["token_ids"][:] = token_ids + [0] * padding
    arrays["sources"][:] = sources
    spans = zip(geometry.query_lens, geometry.context_lens, geometry.block_tables, strict=True)
    block_size = geometry.block_size
    positions: list[int] = []
    slots: list[int] = []
    tables = arrays["block_tables"].reshape(len(geometry.block_tables), -1)
    tables[:] = 0
    for i, (rows, context, table) in enumerate(spans):
        span = range(context - rows, context)
        positions += span
        slots += [table[p // block_size] * block_size + p % block_size for p in span]
        tables[i, : len(table)] = table
    # No slot twice, as long as a block has as many.
    shifts = np.arange(padding) % block_size
    arrays["positions"][:] = positions
    arrays["slot_mapping"][:] = slots
    arrays["slot_mapping"][len(token_ids) :] += shifts
    if geometry.open_pages is not None:
        _fill_sealed(arrays, geometry, geometry.open_pages)
        arrays["open_slots"][len(token_ids) :] += shifts
    arrays["query_start"][:] = (0, *accumulate(geometry.query_lens))
    arrays["context_lens"][:] = geometry.context_lens
    arrays["sample_rows"][:] = sample_rows
    fill_sampling(arrays, [entry for entry in scheduled if entry.samples])


def _fill_sealed(
    arrays: Mapping[str, NDArray[Any]], geometry: Geometry, open_pages: tuple[int, ...]
) -> None:
    """Write where rows go before their block is full, and which blocks the step fills."""
    size = geometry.block_size
    arrays["sealed_lens"][:] = geometry.sealed_lens
    arrays["open_tables"][:] = open_pages
    spans = zip(geometry.query_lens, geometry.context_lens, open_pages, strict=True)
    arrays["open_slots"][:] = [
        page * size + position % size
        for rows, context, page in spans
        for position in range(context - rows, context)
    ]
    blocks = zip(geometry.context_lens, geometry.block_tables, open_pages, strict=True)
    arrays["moves"].reshape(-1, 2)[:] = [
        (-1, -1) if context % size else (page, table[-1]) for context, table, page in blocks
    ]


def fill_sampling(
    arrays: Mapping[str, NDArray[Any]], entries: Sequences[ScheduledSequence]
) -> None:
    """Write the settings of the rows that sample; the rest is greedy."""
    count = len(entries)
    settings = [entry.sequence.request.sampling for entry in entries]
    for name, rest in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        arrays[name][:count] = [getattr(sampling, name) for sampling in settings]
        arrays[name][count:] = rest
    arrays["uniform"][:count] = uniform_numbers(entries)
    arrays["uniform"][count:] = 0.0
