"""Launches the gated delta rule on the recurrent kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.recurrence.launch import run_rows

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.state_spans import StateSpans


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.gated_delta`."""
    return run_rows(query, key, value, log_decay, beta, state, spans, corrects=True)
