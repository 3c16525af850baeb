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
    sample_rows: list[int] = []
    sampling: list[Sequence] = []
    for item in plan.scheduled:
        end = item.start + item.num_tokens
        token_ids += item.sequence.token_ids[item.start : end]
        positions += range(item.start, end)
        if item.samples:
            sample_rows.append(len(token_ids) - 1)
            sampling.append(item.sequence)
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        ragged=RaggedBatch.of(
            [item.num_tokens for item in plan.scheduled],
            [item.start + item.num_tokens for item in plan.scheduled],
            [item.sequence.block_table for item in plan.scheduled],
            block_size=block_size,
            device=device,
            open_pages=plan.open_pages,
        ),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        sampling=tuple(sampling),
    )
