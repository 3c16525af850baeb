"""Fusing the weights of one input."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.backend import REFERENCE
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.model.linear import LinearPart, SideBySide, prepare_fused

IN_FEATURES = 64
GENERATOR = torch.Generator().manual_seed(0)


def packed(
    rows: int, bits: int = 4, group_size: int = 32, dtype: torch.dtype = torch.float16
) -> PackedWeight:
    shape = (rows, IN_FEATURES // group_size)
    return PackedWeight(
        codes=torch.randint(0, 256, (rows, IN_FEATURES * bits // 8), generator=GENERATOR).byte(),
        scale=torch.rand(shape, generator=GENERATOR).to(dtype),
        offset=torch.randn(shape, generator=GENERATOR).to(dtype),
        offset_kind=OffsetKind.ADDITIVE,
        bits=bits,
        group_size=group_size,
    )


def dense(rows: int) -> torch.Tensor:
    return torch.randn(rows, IN_FEATURES, generator=GENERATOR)


@pytest.mark.parametrize(
    ("weights", "num_linears"),
    [
        ([packed(8), packed(4), packed(4)], 1),
        ([dense(8), dense(4), dense(4)], 1),
        ([packed(8), packed(4), packed(4, bits=8)], 2),
        ([packed(8), packed(4, group_size=64), packed(4)], 3),
        ([packed(8), packed(4, dtype=torch.bfloat16)], 2),
        ([dense(8), dense(4), packed(4, bits=8)], 2),
        ([packed(5)], 1),
    ],
    ids=["packed", "dense", "bits", "groups", "scales", "mixed", "single"],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_stand_in_the_order_of_the_parts(
    weights: list[torch.Tensor | PackedWeight], num_linears: int, has_bias: bool
) -> None:
    biases = [torch.randn(w.shape[0], generator=GENERATOR) if has_bias else None for w in weights]
    parts = [LinearPart(w, b) for w, b in zip(weights, biases, strict=True)]
    linear = prepare_fused(parts, REFERENCE, torch.float32)
    x = torch.randn(3, IN_FEATURES, generator=GENERATOR)
    expected = torch.cat(
        [
            torch.nn.functional.linear(
                x, w.dequantize() if isinstance(w, PackedWeight) else w, b
            )
            for w, b in zip(weights, biases, strict=True)
        ],
        dim=1,
    )  # fmt: skip
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-5)
    assert (len(linear.parts) if isinstance(linear, SideBySide) else 1) == num_linears
    assert (linear.in_features, linear.out_features) == (IN_FEATURES, expected.shape[1])
    elements = sum(w.shape[0] * (IN_FEATURES + has_bias) for w in weights)
    assert linear.nbytes == 4 * elements  # the reference keeps everything in float32
