"""A plan as arrays in the staging buffer: what the device reads in one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from appliance.engine.device_sampler import uniform_numbers
from appliance.engine.staging import StepShape
from appliance.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.plan import Plan, ScheduledSequence
    from appliance.engine.sequence import Sequence
    from appliance.engine.staging import StepTensors


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which rows belong to which sequence, on the host; those that fill a batch up included."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, scheduled: Sequences[ScheduledSequence], block_size: int, num_seqs: int, spare: int
    ) -> Geometry:
        """Lay entries side by side, and sequences of one token in the spare block behind them.

        Args:
            scheduled: those with a single row first.
            block_size: token slots in a block.
            num_seqs: how many sequences there are to be in all.
            spare: a block that holds nothing.
        """
        padding = num_seqs - len(scheduled)
        tables = (
            tuple(entry.sequence.block_table[: -(-entry.end // block_size)]) for entry in scheduled
        )
        return cls(
            query_lens=(*(entry.num_tokens for entry in scheduled), *(1,) * padding),
            context_lens=(*(entry.end for entry in scheduled), *(1,) * padding),
            block_tables=(*tables, *((spare,),) * padding),
        )

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
        )


def is_decode(plan: Plan) -> bool:
    """Whether every sequence has one row and samples."""
    return all(entry.num_tokens == 1 and entry.samples for entry in plan.scheduled)


def shape_of(scheduled: Sequences[ScheduledSequence], geometry: Geometry) -> StepShape:
    """Sizes of the step; decode rows that fill it up have settings for sampling too."""
    num_seqs = len(geometry.query_lens)
    return StepShape(
        num_tokens=sum(geometry.query_lens),
        num_seqs=num_seqs,
        num_samples=num_seqs - len(scheduled) + sum(entry.samples for entry in scheduled),
        table_width=max(map(len, geometry.block_tables)),
    )


def fill(
    arrays: Mapping[str, NDArray[Any]],
    scheduled: Sequences[ScheduledSequence],
    geometry: Geometry,
    block_size: int,
    places: Mapping[Sequence, int],
    first_source: int,
) -> None:
    """Write a step into its staging arrays.

    Args:
        arrays: of the step's shape.
        scheduled: the plan's entries.
        geometry: of these.
        block_size: token slots in a block.
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
    positions: list[int] = []
    slots: list[int] = []
    tables = arrays["block_tables"].reshape(len(geometry.block_tables), -1)
    tables[:] = 0
    for i, (rows, context, table) in enumerate(spans):
        span = range(context - rows, context)
        positions += span
        slots += [table[p // block_size] * block_size + p % block_size for p in span]
        tables[i, : len(table)] = table
    for i in range(padding):  # no slot twice, as long as a block has as many
        slots[len(token_ids) + i] += i % block_size
    arrays["positions"][:] = positions
    arrays["slot_mapping"][:] = slots
    arrays["query_start"][:] = (0, *accumulate(geometry.query_lens))
    arrays["context_lens"][:] = geometry.context_lens
    arrays["sample_rows"][:] = sample_rows
    fill_sampling(arrays, [entry for entry in scheduled if entry.samples])


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
