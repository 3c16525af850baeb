"""A linear whose columns are in another order than its inputs: gathers x first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Linear


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """Calls a linear with x in the order of the weight's columns."""

    linear: Linear
    input_order: Tensor  # (in_features,) int32

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def nbytes(self) -> int:
        """Bytes that the weight, the bias and the order take."""
        return self.linear.nbytes + self.input_order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), dtype of x."""
        return self.linear(x.index_select(1, self.input_order))


def reordered(linear: Linear, input_order: Tensor | None) -> Linear:
    """Wrap a linear for inputs in their own order; see `PackedWeight.input_order`."""
    return linear if input_order is None else ReorderedLinear(linear, input_order)
