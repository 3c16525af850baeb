"""Packed matmul by definition: dequantize the weight, multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels.weights.weight import Weight, dense


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """x @ weight.T + bias in the weight's dtype, whatever the dtype of x."""

    weight: Tensor  # (out_features, in_features)
    bias: Tensor | None  # (out_features,), dtype of weight

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), dtype of x."""
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


def prepare_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> DenseLinear:
    """Lay a weight out for the reference: dense float32, for activations of any `dtype`.

    Args:
        weight: (out_features, in_features), in any form.
        bias: (out_features,) or None.
    """
    assert dtype.is_floating_point, dtype
    return dense_linear(weight, bias, torch.float32)


def dense_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> DenseLinear:
    """Lay a weight out for torch: dense, in the dtype of the activations.

    torch chooses the order of summation by the number of rows, so a row's last bits may depend on
    the rows beside it.
    """
    return DenseLinear(dense(weight, dtype), None if bias is None else bias.to(dtype))
