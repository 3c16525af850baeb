from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.fp4_weights import random_fp4
from support.kernels.packed_weights import random_packed
from torch import Tensor
from torch.nn import functional

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU, Gating
from appliance.kernels.operations import Linear
from appliance.kernels.packed_matmul import launch
from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_gate_up, prepare_linear
from appliance.kernels.packed_matmul.tiled import Params, centered
from appliance.kernels.packed_matmul.tiles import choose_tile
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from tests.kernels.executed.multiplying import (
    BF16,
    FP16,
    ROUNDING,
    Errors,
    activations,
    errors_of,
)

# How much more the error may be than that of torch's product with the weight made dense.
MORE_THAN_DENSE = 1.5
UNROUNDED_ROWS = 64
OFFSET_ROUNDING = 2**-11  # of an offset to float16, around the middle code


def assert_near_dense(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: PackedWeight | Fp4Weight,
    bias: torch.Tensor | None = None,
) -> Errors:
    """Within 1.5 times the error of torch's product in this dtype, on average and at worst."""
    errors = errors_of(found, x, weight.dequantize(torch.float64), bias)
    assert errors.found.mean() <= MORE_THAN_DENSE * errors.dense.mean()
    assert errors.found.max() <= MORE_THAN_DENSE * errors.dense.max()
    return errors


def assert_near_exact(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: PackedWeight | Fp4Weight,
    bias: torch.Tensor | None = None,
) -> None:
    """As `assert_near_dense`, and no weight was rounded before the product."""
    errors = assert_near_dense(found, x, weight, bias)
    sums = x.double().unflatten(1, (-1, weight.group_size)).sum(-1).abs()
    offsets = torch.zeros(())
    if isinstance(weight, PackedWeight):
        offsets = OFFSET_ROUNDING * sums @ centered(weight)[1].double().abs().t()
    assert (errors.found <= errors.allowed + offsets).all()


@pytest.fixture(autouse=True)
def _counters_stay_zero() -> Iterator[None]:
    yield
    assert not launch.workspace_of(torch.device("cpu")).arrived.any()


# Every two of rows, group, bits and symmetry meet.
@pytest.mark.parametrize(
    ("rows", "group_size", "bits", "symmetric"),
    [
        (1, 32, 4, True),
        (1, 64, 8, False),
        (1, 128, 4, False),
        (16, 32, 8, False),
        (16, 64, 4, True),
        (16, 128, 8, True),
        (17, 32, 4, False),
        (17, 64, 8, True),
        (17, 128, 4, True),
        (64, 32, 8, True),
        (64, 64, 4, False),
        (64, 128, 8, False),
    ],
)
def test_every_code_and_group(bits: int, group_size: int, symmetric: bool, rows: int) -> None:
    weight = random_packed(
        72, 384, group_size, bits=bits, symmetric=symmetric, kind=OffsetKind.ZERO_POINT
    )
    dtype = BF16 if rows in (1, 64) else FP16
    linear = prepare_linear(weight, None, dtype)
    assert isinstance(linear, TiledLinear)
    params = Params.FP16_ZERO if bits == 4 else Params.FP16_OFFSET
    assert linear.weight.params_kind is (Params.FP32 if symmetric else params)
    x = activations(rows, 384, dtype)
    assert_near_exact(linear(x), x, weight)


# Every two of rows, form and dtype meet; a width that is no whole block.
@pytest.mark.parametrize(
    ("rows", "form", "dtype"),
    [
        (1, torch.float8_e8m0fnu, BF16),
        (1, torch.float8_e4m3fn, FP16),
        (16, torch.float8_e8m0fnu, FP16),
        (16, torch.float8_e4m3fn, BF16),
        (20, torch.float8_e8m0fnu, BF16),
        (70, torch.float8_e4m3fn, BF16),
    ],
)
@pytest.mark.parametrize("in_features", [256, 96])
def test_four_bit_floats(
    rows: int, form: torch.dtype, dtype: torch.dtype, in_features: int
) -> None:
    weight, bias = random_fp4(72, in_features, form), torch.randn(72)
    linear = prepare_linear(weight, bias, dtype)
    assert isinstance(linear, TiledLinear)
    x = activations(rows, in_features, dtype)
    assert_near_exact(linear(x), x, weight, bias)


def test_many_rows_of_four_bit_floats_by_a_dense_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_slices", lambda *_: (64, 64, 64))
    weight = random_fp4(144, 128, torch.float8_e4m3fn)
    x = activations(600, 128, BF16)
    linear = prepare_linear(weight, None, BF16)
    assert isinstance(linear, TiledLinear)
    dense = x.new_empty(64, 128)
    launch.dequantize_rows(linear.weight, 64, dense)
    torch.testing.assert_close(dense, weight.dequantize(BF16)[64:128], rtol=2**-7, atol=0)
    y = x.double() @ weight.dequantize(BF16).double().t()
    torch.testing.assert_close(linear(x).double(), y, rtol=2e-2, atol=4e-3 * float(y.abs().max()))
    gate, up = y.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    gated = prepare_gate_up(weight, None, BF16, Activation.SILU)(x).double()
    torch.testing.assert_close(gated, expected, rtol=4e-2, atol=4e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 33, 130])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    weight, bias = random_packed(64, 256, 64), torch.randn(64)
    x = activations(rows, 256, dtype)
    # With more rows Hopper's weights take scale and offset before the product.
    check = assert_near_exact if rows <= UNROUNDED_ROWS else assert_near_dense
    check(prepare_linear(weight, bias, dtype)(x), x, weight, bias)


@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(64, 576, 32), (100, 1536, 32), (1, 96, 32), (65, 96, 96), (40, 32, 32), (64, 512, 256)],
)
@pytest.mark.parametrize("rows", [3, 20])
def test_ragged_sizes(out_features: int, in_features: int, group_size: int, rows: int) -> None:
    weight = random_packed(out_features, in_features, group_size, symmetric=in_features == 576)
    linear = prepare_linear(weight, None, BF16)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    x = activations(rows, in_features, BF16)
    assert_near_exact(linear(x), x, weight)


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, Params.FP32_OFFSET), (BF16, Params.FP16_OFFSET)]
)
def test_scales_of_other_dtypes(rows: int, dtype: torch.dtype, kind: Params) -> None:
    weight = random_packed(64, 128, 64, dtype=dtype)
    linear = prepare_linear(weight, None, BF16)
    assert isinstance(linear, TiledLinear)
    assert linear.weight.params_kind is kind
    x = activations(rows, 128, BF16)
    assert_near_exact(linear(x), x, weight)


@pytest.mark.parametrize("splits", [3, 8])
@pytest.mark.parametrize("rows", [5, 70])
def test_splits_add_up_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch, splits: int, rows: int
) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    weight, bias = random_packed(72, 1024, 128), torch.randn(72)
    x = activations(rows, 1024, BF16)
    linear = prepare_linear(weight, bias, BF16)
    first = linear(x)
    (assert_near_exact if rows <= UNROUNDED_ROWS else assert_near_dense)(first, x, weight, bias)
    with torch.inference_mode():  # another test may have made it there
        launch.workspace_of(torch.device("cpu")).partial.fill_(torch.nan)
    assert torch.equal(linear(x), first)


# Form, dtype, and what the kernel reads of scales.
@pytest.mark.parametrize(
    ("group_size", "form", "dtype", "params"),
    [
        (128, {"symmetric": True}, BF16, Params.FP32),
        (64, {"kind": OffsetKind.ZERO_POINT}, BF16, Params.FP16_ZERO),
        (128, {}, FP16, Params.FP16_OFFSET),
        (128, {"dtype": torch.float32}, BF16, Params.FP32_OFFSET),
        (32, {"symmetric": True}, FP16, Params.FP32),
        (32, {"kind": OffsetKind.ZERO_POINT}, BF16, Params.FP16_ZERO),
        (32, {}, BF16, Params.FP16_OFFSET),
        (32, {"dtype": torch.float32}, BF16, Params.FP32_OFFSET),
        (32, {"symmetric": True, "bits": 8}, BF16, Params.FP32),
        (32, {"bits": 8}, FP16, Params.FP16_OFFSET),
    ],
)
def test_weights_that_take_scale_and_offset(
    monkeypatch: pytest.MonkeyPatch,
    group_size: int,
    form: dict[str, Any],
    dtype: torch.dtype,
    params: Params,
) -> None:
    tile = choose_tile(70, 90, may_fold=True)
    assert tile.folds
    monkeypatch.setattr(launch, "choose_tile", lambda *_, **__: tile)
    weight, bias = random_packed(136, 384, group_size, **form), torch.randn(136)
    linear = prepare_linear(weight, bias, dtype)
    assert isinstance(linear, TiledLinear)
    assert linear.weight.params_kind is params
    x = activations(70, 384, dtype)
    assert_near_dense(linear(x), x, weight, bias)


GATES: dict[str, tuple[Gating, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (Activation.SILU, lambda gate, up: functional.silu(gate) * up),
    "gelu_tanh": (
        Activation.GELU_TANH, lambda gate, up: functional.gelu(gate, approximate="tanh") * up
    ),
    "gelu": (Activation.GELU, lambda gate, up: functional.gelu(gate) * up),
    "relu_squared": (Activation.RELU_SQUARED, lambda gate, up: functional.relu(gate) ** 2 * up),
    "relu": (Activation.RELU, lambda gate, up: functional.relu(gate) * up),
    "clamped": (
        ClampedSwiGLU(7.0, 1.702),
        lambda gate, up: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
        * (up.clamp(-7, 7) + 1),
    ),
    "bounded": (
        BoundedSwiGLU(7.0), lambda gate, up: functional.silu(gate).clamp(max=7) * up.clamp(-7, 7)
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", GATES)
def test_gated(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, splits: int) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    weight, bias = random_packed(144, 512, 64), torch.randn(144)
    x = activations(rows, 512, BF16)
    activation, exactly = GATES[name]
    linear = prepare_gate_up(weight, bias, BF16, activation)
    gate, up = (x.double() @ weight.dequantize(torch.float64).t() + bias.double()).chunk(2, 1)
    expected = exactly(gate, up)
    error = (linear(x).double() - expected).abs()
    assert linear.out_features == 72
    assert (error <= ROUNDING[BF16] * expected.abs() + 1e-4 * expected.abs().max()).all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_by_a_dense_product(
    monkeypatch: pytest.MonkeyPatch, bits: int, gated: bool
) -> None:
    monkeypatch.setattr(launch, "choose_slices", lambda *_: (192, 128))
    weight, bias = random_packed(320, 256, 32, bits=bits), torch.randn(320)
    x = activations(600, 256, BF16)
    plain = prepare_linear(weight, None, BF16)
    assert isinstance(plain, TiledLinear)
    dense = x.new_empty(128, 256)
    launch.dequantize_rows(plain.weight, 128, dense)
    torch.testing.assert_close(dense, weight.dequantize(BF16)[128:256], rtol=2**-7, atol=2e-3)
    if gated:
        linear: Linear = prepare_gate_up(weight, bias, BF16, Activation.GELU_TANH)
    else:
        linear = prepare_linear(weight, bias, BF16)
    assert isinstance(linear, TiledLinear)
    out = linear(x)
    y = x.float() @ weight.dequantize(BF16).float().t() + bias
    if gated:
        gate, up = y.chunk(2, 1)
        y = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out.float(), y, rtol=2e-2, atol=0.3)


def test_neighbours_change_no_bit_within_a_tile_of_the_table() -> None:
    weight = random_packed(64, 256, 128)
    linear = prepare_linear(weight, None, BF16)
    for rows in ((1, 7, 8), (9, 16), (17, 32), (65, 128)):
        x = activations(rows[-1], 256, BF16)
        together = linear(x)
        for count in rows:
            assert torch.equal(linear(x[:count]), together[:count])
        assert torch.equal(linear(x.flip(0)).flip(0), together)


def test_no_rows() -> None:
    linear = prepare_linear(random_packed(72, 128, 32), None, BF16)
    assert linear(torch.empty(0, 128, dtype=BF16)).shape == (0, 72)


def test_other_weights_stay_dense() -> None:
    weight = random_packed(72, 128, 32)
    assert not isinstance(prepare_linear(weight, None, torch.float32), TiledLinear)
    assert not isinstance(prepare_linear(torch.randn(8, 8), None, BF16), TiledLinear)


@pytest.mark.parametrize(
    ("in_features", "group_size", "words"),
    [(48, 16, "groups of 16.*multiples of 32"), (96, 48, "groups of 48")],
)
def test_what_no_kernel_covers_is_refused(in_features: int, group_size: int, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        prepare_linear(random_packed(16, in_features, group_size), None, BF16)
    with pytest.raises(UnsupportedModelError, match="multiples of 16"):
        prepare_gate_up(random_packed(24, 128, 32), None, BF16, Activation.SILU)


def test_inputs_of_another_order_are_gathered_first() -> None:
    plain = random_packed(64, 128, 32)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3)).int()
    weight = replace(plain, input_order=order)
    x = activations(3, 128, BF16)
    linear, gathered = prepare_linear(weight, None, BF16), prepare_linear(plain, None, BF16)
    assert torch.equal(linear(x), gathered(x[:, order.long()]))
    assert_near_exact(linear(x), x, weight)
