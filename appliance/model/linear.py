"""Linears of a decoder: weights with one input are fused if their packing allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A checkpoint's weight on the device."""

    weight: Weight  # (out_features, in_features)
    bias: Tensor | None  # (out_features,)

    @property
    def device(self) -> torch.device:
        weight = self.weight
        if isinstance(weight, GgmlWeight):
            return weight.blocks.device
        if isinstance(weight, TrellisWeight):
            return weight.symbols.device
        if isinstance(weight, PackedWeight | Fp8Weight | Fp4Weight):
            return weight.codes.device
        return weight.device

    def rows(self, index: arrays.Rows) -> LinearPart:
        """Return some output rows, a range or a list of indices.

        An FP8 or trellis weight becomes dense if the rows cut its blocks or are a list.
        """
        bias = None if self.bias is None else self.bias[index]
        if isinstance(self.weight, PackedWeight | Fp4Weight | GgmlWeight):
            return LinearPart(self.weight.rows(index), bias)
        if isinstance(self.weight, TrellisWeight):
            blocks = self.weight.whole_rows(index) if isinstance(index, slice) else None
            return LinearPart(blocks or self.weight.dequantize("bfloat16", index), bias)
        if isinstance(self.weight, Fp8Weight):
            if isinstance(index, slice):
                first, last, _ = index.indices(self.weight.shape[0])
                if (whole := self.weight.rows(first, last)) is not None:
                    return LinearPart(whole, bias)
                return LinearPart(self.weight.dequantize(rows=index), bias)
            return LinearPart(self.weight.dequantize()[index], bias)
        return LinearPart(self.weight[index], bias)


@dataclass(frozen=True, slots=True)
class ConcatenatedLinear:
    """Linears with one input that could not be fused; concatenates their outputs."""

    parts: tuple[Linear, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights and biases take."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        return arrays.cat([part(x) for part in self.parts], dim=-1)  # type: ignore[no-any-return]


def prepare_fused(parts: list[LinearPart], backend: Backend, dtype: torch.dtype) -> Linear:
    """Prepare one linear with the output rows of all parts, in order.

    Neighbours with the same packing are stacked; if several remain, they run in turn.
    """
    linears = [
        backend.prepare_linear(part.weight, part.bias, dtype) for part in stack_neighbours(parts)
    ]
    return linears[0] if len(linears) == 1 else ConcatenatedLinear(tuple(linears))


def stack_neighbours(parts: list[LinearPart]) -> list[LinearPart]:
    """Stack parts into as few as their packing allows, in order."""
    runs: list[list[LinearPart]] = []
    for part in parts:
        if runs and _stacks(runs[-1][-1].weight, part.weight):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        LinearPart(
            _stack([part.weight for part in run]), _stack_biases([part.bias for part in run])
        )
        for run in runs
    ]


def _stacks(upper: Weight, lower: Weight) -> bool:
    """Return True if two weights can be stacked."""
    if arrays.is_array(upper) or arrays.is_array(lower):
        return arrays.is_array(upper) and arrays.is_array(lower) and lower.dtype == upper.dtype
    above: Any = upper  # of one kind with the other, so it knows
    return type(upper) is type(lower) and bool(above.stacks_with(lower))


def _stack(weights: list[Weight]) -> Weight:
    if len(weights) == 1:
        return weights[0]
    kind: Any = type(weights[0])
    stacked: Weight = (
        arrays.cat(weights) if arrays.is_array(weights[0]) else kind.concatenate(weights)
    )
    return stacked


def _stack_biases(biases: list[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(biases)), "all parts of a fused linear have a bias, or none"
    return arrays.cat(present) if present else None
