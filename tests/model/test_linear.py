"""Fusing the weights of one input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.weight import dense as dense_of
from appliance.model.linear import ConcatenatedLinear, LinearPart, prepare_fused, stack_neighbours

FLOAT = torch.float32

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
    assert (len(linear.parts) if isinstance(linear, ConcatenatedLinear) else 1) == num_linears
    assert (linear.in_features, linear.out_features) == (IN_FEATURES, expected.shape[1])
    elements = sum(w.shape[0] * (IN_FEATURES + has_bias) for w in weights)
    assert linear.nbytes == 4 * elements  # the reference keeps everything in float32


def fp8(rows: int, *, blockwise: bool = False) -> Fp8Weight:
    values = torch.randn(rows, 256, generator=GENERATOR).to(torch.float8_e4m3fn)
    shape = (-(-rows // 128), 2) if blockwise else (rows,)
    return Fp8Weight(values, torch.rand(shape, generator=GENERATOR) + 0.5)


@pytest.mark.parametrize(
    ("weights", "num_linears"),
    [
        ([fp8(8), fp8(4), fp8(5)], 1),
        ([fp8(256, blockwise=True), fp8(128, blockwise=True), fp8(72, blockwise=True)], 1),
        ([fp8(72, blockwise=True), fp8(72, blockwise=True)], 2),
        ([fp8(128, blockwise=True), fp8(128)], 2),
        ([replace(fp8(8), quantized_inputs=True), fp8(8)], 2),
    ],
    ids=["channels", "blocks", "cut blocks", "mixed", "inputs"],
)
def test_fp8_weights_stack_where_no_block_is_cut(
    weights: list[Fp8Weight], num_linears: int
) -> None:
    stacked = stack_neighbours([LinearPart(weight, None) for weight in weights])
    assert len(stacked) == num_linears
    found = torch.cat([dense_of(part.weight, FLOAT) for part in stacked])
    assert torch.equal(found, torch.cat([weight.dequantize() for weight in weights]))
    linear = prepare_fused([LinearPart(weight, None) for weight in weights], REFERENCE, FLOAT)
    x = torch.randn(3, 256, generator=GENERATOR)
    torch.testing.assert_close(linear(x), x @ found.T, atol=1e-3, rtol=1e-5)


def test_some_rows_of_an_fp8_weight_may_cut_its_blocks() -> None:
    part = LinearPart(fp8(300, blockwise=True), torch.arange(300.0))
    rows = part.rows(slice(50, 200))
    assert isinstance(rows.weight, torch.Tensor)
    assert isinstance(part.weight, Fp8Weight)
    assert torch.equal(rows.weight, part.weight.dequantize()[50:200])
    assert rows.bias is not None
    assert torch.equal(rows.bias, torch.arange(50.0, 200.0))
