"""Inputs of matmuls, and the errors of their results."""

from __future__ import annotations

from typing import NamedTuple

import torch

BF16, FP16 = torch.bfloat16, torch.float16
# What rounding a result costs at most, as a share of it, beside the error of the sums.
ROUNDING = {BF16: 2**-8, FP16: 2**-11}


def activations(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor that is NaN elsewhere: what is padding is never read."""
    random = torch.Generator().manual_seed(rows)
    x = torch.full((rows + 3, width + 16), torch.nan, dtype=dtype)
    x[:rows, :width] = torch.randn(rows, width, generator=random).to(dtype)
    return x[:rows, :width]


class Errors(NamedTuple):
    """Distances from the exact product, element by element.

    Attributes:
        found: of the result.
        dense: of torch's product with the weight made dense in the activations' type.
        allowed: what rounding the result and sums in float32 may cost.
    """

    found: torch.Tensor
    dense: torch.Tensor
    allowed: torch.Tensor


def errors_of(
    found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> Errors:
    """Compare with the product of exact weights `w`, float64."""
    assert found.dtype == x.dtype
    more = 0 if bias is None else bias.double()
    expected = x.double() @ w.t() + more
    dense = (x.float() @ w.to(x.dtype).float().t() + more).to(x.dtype)
    summing = 1e-5 * (x.double().abs() @ w.abs().t())
    return Errors(
        (found.double() - expected).abs(),
        (dense.double() - expected).abs(),
        ROUNDING[x.dtype] * expected.abs() + summing + 1e-6,
    )
