"""A plan as tensors: what the model reads in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.plan import Plan
    from appliance.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, decode rows first, then prefill chunks."""

    token_ids: Tensor  # (num_tokens,) int64
    positions: Tensor  # (num_tokens,) int64
    ragged: RaggedBatch
    sample_rows: Tensor  # (num_samples,) int64, rows whose logits are wanted
    sampling: tuple[Sequence, ...]  # the sequence of each of these rows


def build(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """Lay out a plan's rows side by side.

    Args:
        plan: sequences with the span of tokens that each runs; decodes first.
        block_size: token slots in a block.
        device: where the tensors go.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    sample_rows: list[int] = []
    sampling: list[Sequence] = []
    for item in plan.scheduled:
        sequence, start, end = item.sequence, item.start, item.start + item.num_tokens
        table = sequence.block_table
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        query_start.append(len(token_ids))
        if item.samples:
            sample_rows.append(len(token_ids) - 1)
            sampling.append(sequence)

    query_lens = tuple(item.num_tokens for item in plan.scheduled)
    context_lens = tuple(item.start + item.num_tokens for item in plan.scheduled)
    tables = [
        tuple(item.sequence.block_table[: -(-length // block_size)])
        for item, length in zip(plan.scheduled, context_lens, strict=True)
    ]
    width = max(map(len, tables))
    ragged = RaggedBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor(
            [table + (0,) * (width - len(table)) for table in tables],
            dtype=torch.int32,
            device=device,
        ),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        num_decodes=_leading_ones(query_lens),
        host_query_lens=query_lens,
        host_context_lens=context_lens,
        host_block_tables=tuple(tables),
    )
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        ragged=ragged,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        sampling=tuple(sampling),
    )


def _leading_ones(query_lens: tuple[int, ...]) -> int:
    for i, length in enumerate(query_lens):
        if length != 1:
            return i
    return len(query_lens)
