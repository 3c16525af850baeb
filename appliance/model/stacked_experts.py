"""Stacks a layer's experts so that a backend multiplies all of them in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.fp8 import BLOCK, Fp8Weight
from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear, padded_rows
from appliance.kernels.packed import PackedWeight
from appliance.kernels.weight_codes.order import TILE_N
from appliance.model.linear import LinearPart, stack_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.operations import Backend, RoutedMLPs
    from appliance.model.layer_weights import MLPWeights
    from appliance.model.spec import ExpertsSpec


def group_experts(
    expert: Callable[[int], MLPWeights], spec: ExpertsSpec, backend: Backend, dtype: torch.dtype
) -> RoutedMLPs | None:
    """Build all experts as one operation; None if backend or packing do not allow it."""
    if backend.prepare_experts is None:
        return None
    stacked = stack_experts([expert(number) for number in spec.experts], spec)
    return None if stacked is None else backend.prepare_experts(stacked, dtype)


def stack_experts(experts: Sequence[MLPWeights], spec: ExpertsSpec) -> StackedExperts | None:
    """Stack the weights of experts; None if their packing does not allow it."""
    inner, up = _stack([expert.gate_up for expert in experts]), None
    if inner is None and all(len(expert.gate_up) == 2 for expert in experts):
        inner, up = (_stack([[expert.gate_up[half]] for expert in experts]) for half in range(2))
        if up is None:
            return None
    down = _stack([[expert.down] for expert in experts])
    if inner is None or down is None:
        return None
    is_part = spec.held is not None
    return StackedExperts(len(experts), inner, down, spec.activation, spec.gated, up, is_part)


def _stack(experts: Sequence[list[LinearPart]]) -> StackedLinear | None:
    linears = []
    for parts in experts:
        stacked = stack_neighbours(parts)
        if len(stacked) > 1:
            return None
        linears += stacked
    out_features = linears[0].weight.shape[0]
    last = len(linears) - 1
    order = _orders(linears)
    whole = stack_neighbours(
        [_padded(_in_stored_order(linear), i == last) for i, linear in enumerate(linears)]
    )
    if len(whole) > 1:
        return None
    return StackedLinear(whole[0].weight, whole[0].bias, out_features, order)


def _orders(linears: Sequence[LinearPart]) -> Tensor | None:
    """Return `StackedLinear.order`."""
    orders = [
        linear.weight.input_order if isinstance(linear.weight, PackedWeight) else None
        for linear in linears
    ]
    if all(order is None for order in orders):
        return None
    plain = torch.arange(linears[0].weight.shape[1], dtype=torch.int32, device=linears[0].device)
    return torch.stack([plain if order is None else order for order in orders])


def _in_stored_order(part: LinearPart) -> LinearPart:
    if not isinstance(part.weight, PackedWeight):
        return part
    return replace(part, weight=replace(part.weight, input_order=None))


def _padded(part: LinearPart, is_last: bool) -> LinearPart:
    """Repeat a row of an expert's weight until its rows fill whole tiles or blocks."""
    rows, weight = part.weight.shape[0], part.weight
    blockwise = isinstance(weight, Fp8Weight) and weight.is_blockwise
    index = padded_rows(rows, is_last=is_last, multiple=BLOCK if blockwise else TILE_N)
    if len(index) == rows:
        return part
    index = index.to(part.device)
    if not isinstance(weight, Fp8Weight):
        return part.rows(index)
    return LinearPart(weight.padded(index), None if part.bias is None else part.bias[index])
