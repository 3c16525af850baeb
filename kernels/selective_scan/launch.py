"""Launches the selective scan on the recurrent kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.recurrence.launch import run_rows

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.state_spans import StateSpans


def selective_scan(
    value: Tensor,
    key: Tensor,
    query: Tensor,
    size: Tensor,
    rates: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.selective_scan`."""
    return run_rows(query, key, value, rates, size, state, spans, corrects=False)
