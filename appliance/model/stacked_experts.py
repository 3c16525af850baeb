"""Stacks a layer's experts so that a backend multiplies all of them in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear, padded_rows
from appliance.model.linear import LinearPart, stack_neighbours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.layer_weights import MLPWeights
    from appliance.model.spec import ExpertsSpec


def stack_experts(experts: Sequence[MLPWeights], spec: ExpertsSpec) -> StackedExperts | None:
    """Stack the weights of experts; None if their packing does not allow it."""
    inner = _stack([expert.gate_up for expert in experts])
    down = _stack([[expert.down] for expert in experts])
    if inner is None or down is None:
        return None
    return StackedExperts(len(experts), inner, down, spec.activation, spec.gated)


def _stack(experts: Sequence[list[LinearPart]]) -> StackedLinear | None:
    linears = []
    for parts in experts:
        stacked = stack_neighbours(parts)
        if len(stacked) > 1:
            return None
        linears += stacked
    out_features = linears[0].weight.shape[0]
    last = len(linears) - 1
    whole = stack_neighbours([_padded(linear, i == last) for i, linear in enumerate(linears)])
    if len(whole) > 1:
        return None
    return StackedLinear(whole[0].weight, whole[0].bias, out_features)


def _padded(part: LinearPart, is_last: bool) -> LinearPart:
    """Repeat a row of an expert's weight until its rows fill whole tiles."""
    rows = part.weight.shape[0]
    index = padded_rows(rows, is_last=is_last)
    return part if len(index) == rows else part.rows(index.to(part.device))
