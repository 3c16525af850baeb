"""Products of rows that are rounded to int8, beside exact integers and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gguf.ggml_weights import random_ggml
from support.kernels.packed_weights import random_packed
from torch.nn import functional

from appliance.kernels.activation import Activation
from appliance.kernels.int8_matmul import launch, reference
from appliance.kernels.int8_matmul.launch import PromptLinear, multiply_int8, round_prompts
from appliance.kernels.packed_matmul.launch import (
    TiledLinear,
    prepare_gate_up,
    prepare_linear,
    workspace_of,
)
from appliance.kernels.packed_matmul.tiled import Params, centered
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from tests.kernels.executed.multiplying import BF16, FP16, ROUNDING, activations

pytestmark = pytest.mark.capabilities(86, 120)  # of no other the kernel is for
# Of a sum in float32, as a share of the sum of its terms' sizes.
SUMMING = 1e-6


def tiled(weight: PackedWeight | GgmlWeight, bias: torch.Tensor | None = None) -> TiledLinear:
    linear = prepare_linear(weight, bias, BF16)
    assert isinstance(linear, TiledLinear)
    assert round_prompts(linear, 0) is not None
    return linear


def multiplied(linear: TiledLinear, x: torch.Tensor) -> torch.Tensor:
    """The product before it is rounded to the activations' type."""
    out = torch.empty(x.shape[0], linear.out_features, dtype=torch.float32)
    multiply_int8(linear, x, out)
    return out


def rounded(linear: TiledLinear, x: torch.Tensor) -> torch.Tensor:
    """What the reference makes of the inputs, float64."""
    codes, scale = reference.quantize_inputs(x, linear.weight.group_size)
    blocks = codes.double().unflatten(1, (scale.shape[1], -1))
    exact: torch.Tensor = (blocks * scale.double().unsqueeze(2)).flatten(1)
    return exact[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("group_size", "in_features", "rows"),
    [(128, 384, 64), (64, 576, 70), (32, 576, 65), (128, 128, 1), (32, 96, 130), (64, 512, 17)],
)
def test_integers_are_multiplied_exactly(group_size: int, in_features: int, rows: int) -> None:
    """With inputs that are their own codes and scales of 2 and 1/2, to the last bit."""
    random = torch.Generator().manual_seed(rows)
    plain = random_packed(136, in_features, group_size, symmetric=True)
    scale = 2.0 ** torch.randint(-1, 2, plain.scale.shape, generator=random)
    weight = replace(plain, scale=scale.half(), offset=(-8 * scale).half())
    x = torch.randint(-127, 128, (rows, in_features), generator=random)
    linear = tiled(weight)
    x[:, ::group_size] = 127 * (-1) ** torch.arange(rows)[:, None]
    twice = (2 * weight.dequantize(torch.float64)).to(torch.int64)
    found = multiplied(linear, x.to(FP16 if rows % 2 else BF16))
    assert torch.equal((2 * found).to(torch.int64), x @ twice.t())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("rows", "in_features", "group_size"), [(5, 288, 32), (33, 256, 128), (16, 192, 64)]
)
def test_rows_are_rounded_as_the_reference_does(
    rows: int, in_features: int, group_size: int, dtype: torch.dtype
) -> None:
    linear = tiled(random_packed(64, in_features, group_size))
    x = activations(rows, in_features, dtype)
    x[0] = 0
    x[1] *= 1e-4
    x[2, ::3] *= 100
    x[3, 0] = torch.finfo(dtype).smallest_normal
    x[3, 1:] = 0
    codes, scales, sums = launch.quantize_inputs(linear.weight, x, 64)
    expected, scale = reference.quantize_inputs(x, group_size)
    count = codes.shape[1]  # of inputs of whole blocks
    expected = functional.pad(expected, (0, count - expected.shape[1]))
    scale = functional.pad(scale, (0, count // group_size - scale.shape[1]))
    # The order of `kernel.in_order`, written down.
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    in_order = torch.empty_like(expected)
    in_order.unflatten(1, (-1, 16))[:, :, order] = codes.unflatten(1, (-1, 16))
    assert torch.equal(in_order, expected)
    assert torch.equal(scales[:, :rows], scale.t())
    assert sums is not None
    totals = expected.int().unflatten(1, (-1, group_size)).sum(2)
    assert torch.equal(sums[:, :rows], totals.t().float())
    assert not scales[:, rows:].any()
    assert not sums[:, rows:].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    linear = tiled(random_packed(64, 256, 128))
    x = activations(70, 256, BF16)
    x[7, 130] = wrong
    found = multiplied(linear, x)
    assert not found[7].isfinite().any()
    assert found[torch.arange(70) != 7].isfinite().all()


# Form, dtype of scales, and what the kernel reads of them.
@pytest.mark.parametrize(
    ("group_size", "form", "params"),
    [
        (32, {}, Params.FP16_OFFSET),
        (128, {"symmetric": True}, Params.FP32),
        (64, {"kind": OffsetKind.ZERO_POINT}, Params.FP16_ZERO),
        (32, {"kind": OffsetKind.ZERO_POINT}, Params.FP16_ZERO),
        (128, {"kind": OffsetKind.ZERO_POINT}, Params.FP16_ZERO),
        (64, {"dtype": torch.float32}, Params.FP32_OFFSET),
    ],
)
def test_every_form_of_scales(group_size: int, form: dict[str, Any], params: Params) -> None:
    weight, bias = random_packed(136, 384, group_size, **form), torch.randn(136)
    linear = tiled(weight, bias)
    assert linear.weight.params_kind is params
    x = activations(70, 384, BF16)
    near, w = rounded(linear, x), weight.dequantize(torch.float64)
    error = (multiplied(linear, x).double() - (near @ w.t() + bias.double())).abs()
    sums = near.unflatten(1, (-1, group_size)).sum(2).abs()
    # Offsets around the middle code are rounded to float16 when a weight is laid out.
    offsets = 2**-11 * sums @ centered(weight)[1].double().abs().t()
    assert (error <= SUMMING * (near.abs() @ w.abs().t()) + offsets + 1e-5).all()


@pytest.mark.parametrize("rows", [64, 90])
def test_blocks_of_a_ggml_type(rows: int) -> None:
    weight = random_ggml("Q4_K", 72, 512)
    linear = tiled(weight)
    x = activations(rows, 512, BF16)
    near, w = rounded(linear, x), weight.dequantize().double()
    error = (multiplied(linear, x).double() - near @ w.t()).abs()
    assert (error <= SUMMING * 20 * (near.abs() @ w.abs().t()) + 1e-5).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_gates_biases_and_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    weight, bias = random_packed(144, 1024, 64), torch.randn(144)
    x = activations(66, 1024, BF16)
    linear = prepare_gate_up(weight, bias, BF16, Activation.SILU)
    y = rounded(linear, x) @ weight.dequantize(torch.float64).t() + bias.double()
    gate, up = y.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    first = multiplied(linear, x)
    assert linear.out_features == 72
    assert ((first.double() - expected).abs() <= 1e-3 * expected.abs().max()).all()
    assert torch.equal(multiplied(linear, x), first)
    assert not workspace_of(torch.device("cpu")).arrived.any()


def test_rows_that_belong_to_no_prompt_are_multiplied_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "is_faster", lambda *_: True)
    weight, bias = random_packed(64, 256, 128), torch.randn(64)
    linear = tiled(weight, bias)
    x = activations(70, 256, BF16)
    found = PromptLinear(linear, 6)(x)
    assert torch.equal(found[:6], linear(x[:6]))
    assert torch.equal(found[6:], multiplied(linear, x[6:]).to(BF16))
    assert torch.equal(PromptLinear(linear, 0)(x), multiplied(linear, x).to(BF16))
    assert torch.equal(PromptLinear(linear, 7)(x), linear(x))  # too few rows of prompts
    assert not torch.equal(found, linear(x))


def test_rounding_costs_little() -> None:
    """With inputs of a normal distribution a code's error is a 1/127 of the largest over sqrt(12).

    So an output's error, as a share of the outputs' size, is about 0.7 percent.
    """
    weight = random_packed(136, 1024, 128, symmetric=True)
    linear = tiled(weight)
    x = activations(64, 1024, BF16)
    exact = x.double() @ weight.dequantize(torch.float64).t()
    error = (multiplied(linear, x).double() - exact).norm() / exact.norm()
    largest = x.double().unflatten(1, (-1, 128)).abs().amax(2).square().mean().sqrt()
    expected = largest / 127 / 12**0.5 / x.double().square().mean().sqrt()
    assert abs(error / expected - 1) < 0.1
    assert ROUNDING[BF16] < error
