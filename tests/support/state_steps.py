"""Steps of sequences with recurrent state, for operations that run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.state_spans import StateSpans

if TYPE_CHECKING:
    from collections.abc import Sequence


def spans_of(
    query_lens: Sequence[int], context_lens: Sequence[int], slots: Sequence[int]
) -> StateSpans:
    """Lay out a step; one row of each sequence is a decode step."""
    batch = RaggedBatch.of(
        query_lens,
        context_lens,
        [[0] * -(-context // 64) for context in context_lens],
        block_size=64,
        device=torch.device("cpu"),
        state_slots=slots,
    )
    return StateSpans.of(replace(batch, is_decode=max(query_lens) == 1))
