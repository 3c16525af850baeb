"""The geometry of one step: which rows belong to which sequence, and where their keys are.

Built once per step by the engine, read by every layer. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.rows.host_spans import SpanRows


Table = TypeVar("Table", bound="Sequence[int]")


@dataclass(frozen=True, slots=True)
class SealedSpans:
    """The split of tokens between closed and open blocks; see `sealed_blocks`."""

    lens: Tensor  # (num_seqs,) int32, leading tokens in closed blocks, a multiple of 32
    # (num_seqs, max_open) int32, open blocks of the tokens after them. Those of rows that see into
    # later blocks go on in the next sequences' rows, which are pieces of the same chunk.
    open_tables: Tensor
    host_lens: tuple[int, ...]
    host_open_tables: tuple[tuple[int, ...], ...]
    # (num_tokens,) int64, open block * block size + offset, where each row's key and value go
    slot_mapping: Tensor | None = None
    # (n, 2) int64: open blocks that the step fills, and the blocks to seal them into before any
    # row attends.
    moves: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step's sequences: slots of a table that only the executor knows."""

    slots: Tensor  # (num_seqs,) int32, negative without an adapter
    host_slots: tuple[int, ...]
    table: object


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a step whose embedding is given instead of looked up, such as those of a picture.

    Attributes:
        sources: (num_tokens,) int32, each row's place in `embeddings`; negative: looked up.
        embeddings: (num_given, hidden_size), in the stream before the first layer, unscaled.
        addends: (count, num_given, hidden_size), added to the stream after each of the first
            `count` layers (DeepStack, arXiv 2406.04334); None: nothing is.
    """

    sources: Tensor
    embeddings: Tensor
    addends: Tensor | None = None

    @property
    def num_addends(self) -> int:
        return 0 if self.addends is None else self.addends.shape[0]

    def instead_of(self, stream: Tensor) -> Tensor:
        """Return the stream (num_tokens, hidden_size) with the given rows in it."""
        given = self.embeddings.to(stream.dtype)[self.sources.clamp(min=0)]
        return given.where(self.sources.unsqueeze(1) >= 0, stream)

    def added(self, stream: Tensor, layer: int) -> Tensor:
        """Return the stream (num_tokens, hidden_size) with what comes to it after a layer."""
        assert self.addends is not None
        added = self.addends[layer].to(stream.dtype)[self.sources.clamp(min=0)]
        return stream + added * (self.sources.unsqueeze(1) >= 0)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences of unequal length side by side, decode rows and prefill chunks mixed.

    Sequence i owns rows query_start[i] .. query_start[i+1] of every per-token tensor. Its rows
    are the last of its context: its row j has position
    context_lens[i] - query_lens[i] + j and attends to positions 0 .. its own. The first
    `num_decodes` sequences have a row each, or where drafts are verified up to `decode_rows`.
    In a padded step the last sequences may have no row, and the last rows no sequence: what
    attention returns for these is undefined.

    With a sealed cache the rows of a sequence lie in one block, which they read from its open
    block, and all blocks before it closed; a chunk that spans several is laid out as one sequence
    for each. So what a row reads follows from its position, not from how its prompt was cut. Rows
    that see into later blocks read those from their open blocks, too: the step has all of them.
    """

    query_start: Tensor  # (num_seqs + 1,) int32
    context_lens: Tensor  # (num_seqs,) int32, tokens with this step's included
    block_tables: Tensor  # (num_seqs, max_blocks) int32, padded with 0
    slot_mapping: Tensor  # (num_tokens,) int64, slot where each row's key and value go
    num_decodes: int
    # The same on the host, so that launchers and CPU loops never wait for a device.
    host_query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    sealed: SealedSpans | None = None  # with `SealedBlocks` only
    decode_rows: int = 1
    # Of models with recurrent layers: (num_seqs,) int32, the slot of each sequence's state. A
    # sequence laid out as several repeats its slot.
    state_slots: Tensor | None = None
    host_state_slots: tuple[int, ...] | None = None
    adapters: AdapterRows | None = None  # None where no sequence has one
    # (num_tiles, 2) int32, see `attention.work.prefill_tiles`. None builds these, as the rows
    # that pass through states, from the host's numbers, which a captured graph must not do.
    prefill_tiles: Tensor | None = None
    span_rows: SpanRows | None = None
    # The row from which on all belong to prompts; None if there are none, or others after them.
    prompts_from: int | None = None
    given: GivenRows | None = None
    # (3, num_tokens) int64, the positions in time, height and width that rows are rotated by, of
    # models with `RopeSpec.sections`; None: each row's position is all three.
    axes: Tensor | None = None
    # (num_tokens,) int32, the leading tokens of its sequence that each row attends to in layers
    # whose rows see all of their picture; never fewer than for the row before. None: those up to
    # its own. A row of a sequence that decodes sees no more than that.
    sees: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.host_query_lens)

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        device: torch.device,
        open_blocks: Sequence[Sequence[int]] | None = None,
        decode_rows: int = 1,
        state_slots: Sequence[int] | None = None,
        sees: Sequence[int] | None = None,
    ) -> RaggedBatch:
        """Lay sequences side by side.

        Args:
            query_lens: rows of each sequence; those with up to `decode_rows` come first.
            context_lens: tokens of each sequence, these rows included.
            block_tables: blocks of each sequence; those beyond its context are ignored.
            block_size: token slots in a block.
            open_blocks: of the blocks of each sequence's rows; with a sealed cache only.
            decode_rows: most rows of a sequence that decodes.
            state_slots: of each sequence's recurrent state, of models that have one.
            sees: leading tokens that each row sees; None: those up to its own.
        """
        import torch

        opened: list[int] = []
        if open_blocks is not None and state_slots is not None:
            each = zip(state_slots, open_blocks, strict=True)
            state_slots = [slot for slot, own in each for _ in own]
        if open_blocks is not None:
            query_lens, context_lens, block_tables, opened = cut_at_blocks(
                query_lens, context_lens, block_tables, open_blocks, block_size
            )
        ends = list(context_lens)  # of the tokens that any row sees
        if sees is not None:
            ends = [sees[row - 1] for row in accumulate(query_lens)]
        tables = tuple(
            tuple(table[: -(-end // block_size)])
            for table, end in zip(block_tables, ends, strict=True)
        )
        width = max(map(len, tables))
        slots = [
            table[p // block_size] * block_size + p % block_size
            for rows, length, table in zip(query_lens, context_lens, tables, strict=True)
            for p in range(length - rows, length)
        ]

        def int32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            query_start=int32([0, *accumulate(query_lens)]),
            context_lens=int32(context_lens),
            block_tables=int32([table + (0,) * (width - len(table)) for table in tables]),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            num_decodes=sum(
                takewhile(
                    bool,
                    (
                        rows <= decode_rows and end == context
                        for rows, end, context in zip(query_lens, ends, context_lens, strict=True)
                    ),
                )
            ),
            host_query_lens=tuple(query_lens),
            host_context_lens=tuple(context_lens),
            sealed=_spans(query_lens, context_lens, tables, opened, block_size, device)
            if opened
            else None,
            decode_rows=decode_rows,
            state_slots=None if state_slots is None else int32(state_slots),
            host_state_slots=None if state_slots is None else tuple(state_slots),
            sees=None if sees is None else int32(sees),
        )

    def within_chunks(self, chunk: int, block_size: int) -> RaggedBatch:
        """Return the same rows as sequences that begin with their chunk of positions.

        So a row attends to its chunk up to its own position. Of the result, attention alone may be
        computed. `chunk` is a multiple of `block_size`.
        """
        import torch

        assert chunk % block_size == 0, (chunk, block_size)
        seqs, rows, contexts, begins = [], [], [], []
        for seq, (count, context) in enumerate(
            zip(self.host_query_lens, self.host_context_lens, strict=True)
        ):
            position = context - count
            while True:
                begin = min(position, max(context - 1, 0)) // chunk * chunk
                end = min(context, begin + chunk)
                seqs.append(seq)
                rows.append(end - position)
                contexts.append(end - begin)
                begins.append(begin // block_size)
                position = end
                if position >= context:
                    break
        tables, device = self.block_tables, self.block_tables.device
        width = -(-max(contexts) // block_size)
        columns = torch.tensor(begins, device=device)[:, None] + torch.arange(width, device=device)
        sealed = self.sealed
        if sealed is not None:
            lens = [max(context - 1, 0) // block_size * block_size for context in contexts]
            held = torch.tensor(lens, dtype=torch.int32, device=device)
            sealed = replace(sealed, lens=held, host_lens=tuple(lens))

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return replace(
            self,
            query_start=int32([0, *accumulate(rows)]),
            context_lens=int32(contexts),
            block_tables=tables[torch.tensor(seqs, device=device)].gather(
                1, columns.clamp(max=tables.shape[1] - 1)
            ),
            num_decodes=len(list(takewhile(lambda count: count <= self.decode_rows, rows))),
            host_query_lens=tuple(rows),
            host_context_lens=tuple(contexts),
            sealed=sealed,
            prefill_tiles=None,
        )


def cut_at_blocks(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Table],
    open_blocks: Sequence[Sequence[int]],
    block_size: int,
) -> tuple[list[int], list[int], list[Table], list[int]]:
    """Return rows, contexts, tables and open blocks of sequences cut into pieces of one block."""
    rows, contexts, found = [], [], []
    tables: list[Table] = []
    parts = zip(query_lens, context_lens, block_tables, open_blocks, strict=True)
    for count, context, table, own in parts:
        start = context - count
        for block in own:
            end = min(context, (start // block_size + 1) * block_size)
            rows.append(end - start)
            contexts.append(end)
            tables.append(table)
            found.append(block)
            start = end
        assert start == context, "a block of the step has no open block"
    return rows, contexts, tables, found


def _spans(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    opened: list[int],
    block_size: int,
    device: torch.device,
) -> SealedSpans:
    import torch

    starts = [(context - 1) // block_size * block_size for context in context_lens]
    slots = [
        block * block_size + position - start
        for rows, context, start, block in zip(
            query_lens, context_lens, starts, opened, strict=True
        )
        for position in range(context - rows, context)
    ]
    return SealedSpans(
        lens=torch.tensor(starts, dtype=torch.int32, device=device),
        open_tables=torch.tensor(opened, dtype=torch.int32, device=device).unsqueeze(1),
        host_lens=tuple(starts),
        host_open_tables=tuple((block,) for block in opened),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        moves=torch.tensor(
            [
                (block, table[context // block_size - 1])
                for context, table, block in zip(context_lens, tables, opened, strict=True)
                if context % block_size == 0
            ],
            dtype=torch.int64,
            device=device,
        ),
    )
