"""Linears of a decoder: weights of one input fused into one matmul where their packing allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.backend import Backend, Linear


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One weight of a checkpoint, ready on the device."""

    weight: Tensor | PackedWeight  # (out_features, in_features)
    bias: Tensor | None  # (out_features,)

    def rows(self, index: slice) -> LinearPart:
        """Some of its outputs."""
        weight, bias = self.weight, self.bias
        rows = weight.rows(index) if isinstance(weight, PackedWeight) else weight[index]
        return LinearPart(rows, None if bias is None else bias[index])


class SideBySide:
    """Linears of one input that could not be fused: their outputs, one after another."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def prepare_fused(parts: list[LinearPart], backend: Backend, dtype: torch.dtype) -> Linear:
    """One linear whose output rows are those of the parts in order.

    Neighbours of one packing are stacked; if that leaves several, they are called in turn.

    Args:
        parts: weights of equal in_features.
        backend: lays out the weights.
        dtype: of activations.
    """
    linears = [
        backend.prepare_linear(part.weight, part.bias, dtype) for part in stack_neighbours(parts)
    ]
    return linears[0] if len(linears) == 1 else SideBySide(linears)


def stack_neighbours(parts: list[LinearPart]) -> list[LinearPart]:
    """The same output rows in as few parts as packing allows.

    Args:
        parts: weights of equal in_features.
    """
    runs: list[list[LinearPart]] = []
    for part in parts:
        if runs and _packing(runs[-1][0].weight) == _packing(part.weight):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        LinearPart(
            _stack([part.weight for part in run]), _stack_biases([part.bias for part in run])
        )
        for run in runs
    ]


def _packing(weight: Tensor | PackedWeight) -> tuple[object, ...]:
    """What must be equal for two weights to be stacked."""
    if isinstance(weight, PackedWeight):
        return weight.bits, weight.group_size, weight.offset_kind, weight.scale.dtype
    return (weight.dtype,)


def _stack(weights: list[Tensor | PackedWeight]) -> Tensor | PackedWeight:
    if len(weights) == 1:
        return weights[0]
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if packed:
        return PackedWeight.concatenate(packed)
    return torch.cat([weight for weight in weights if not isinstance(weight, PackedWeight)])


def _stack_biases(biases: list[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(biases)), "all parts of a fused linear have a bias, or none"
    return torch.cat(present) if present else None
