"""Steps of sequences with recurrent state, for operations that run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.rows.host_spans import HostSpans, SpanRows
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.rows.state_spans import StateSpans

if TYPE_CHECKING:
    from collections.abc import Sequence


def batch_of(
    query_lens: Sequence[int], context_lens: Sequence[int], slots: Sequence[int]
) -> RaggedBatch:
    """Lay out a step."""
    return RaggedBatch.of(
        query_lens,
        context_lens,
        [[0] * -(-context // 64) for context in context_lens],
        block_size=64,
        device=torch.device("cpu"),
        state_slots=slots,
    )


def spans_of(
    query_lens: Sequence[int], context_lens: Sequence[int], slots: Sequence[int]
) -> StateSpans:
    """The rows of each sequence in a step."""
    return StateSpans.of(batch_of(query_lens, context_lens, slots))


def padded_spans_of(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    slots: Sequence[int],
    *,
    num_rows: int,
    num_spans: int,
    num_chunks: int,
    spare: int,
) -> StateSpans:
    """The same of a step that is padded, and of which the host knows the sizes alone."""
    found = HostSpans.of(slots, query_lens, context_lens)
    parts = found.padded(num_spans, num_chunks, spare)
    batch = replace(
        batch_of(query_lens, context_lens, slots),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
        host_query_lens=(),
        host_context_lens=(),
        host_state_slots=None,
        span_rows=SpanRows(**{name: torch.from_numpy(part) for name, part in parts.items()}),
    )
    return StateSpans.of(batch)
