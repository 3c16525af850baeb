"""Products with weights in the blocks of GGML types, held in their own bits."""

from __future__ import annotations

import pytest
import torch
from support.gguf.ggml_weights import random_ggml

from appliance.kernels.activation import Activation
from appliance.kernels.packed_matmul import launch
from appliance.kernels.packed_matmul.launch import (
    TiledLinear,
    has_gated,
    prepare_gate_up,
    prepare_linear,
    prepare_table,
)
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from tests.kernels.executed.multiplying import BF16, FP16, activations, errors_of

# How much more the error may be than that of torch's product with the weight made dense.
MORE_THAN_DENSE = 1.2


def assert_near_exact(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: GgmlWeight,
    bias: torch.Tensor | None = None,
) -> None:
    """No further than torch's product in this dtype; sums in float32 of the file's own weights."""
    errors = errors_of(found, x, weight.dequantize().double(), bias)
    assert errors.found.mean() <= MORE_THAN_DENSE * errors.dense.mean()
    assert (errors.found <= errors.allowed).all()


def case(name: str, rows: int) -> tuple[GgmlWeight, torch.Tensor]:
    # Of blocks of 32 as many as are no whole block of a program.
    width = 512 if GGML_TYPES[name].block_size == 256 else 288
    weight = random_ggml(name, 72, width)
    return weight, activations(rows, width, BF16 if rows != 5 else FP16)


# Every type with a tile of each height, so ordered that each is compiled for some target.
@pytest.mark.parametrize("rows", [1, 5, 12, 20, 40])
@pytest.mark.parametrize("name", GGML_TYPES)
def test_every_type_and_number_of_rows(name: str, rows: int) -> None:
    weight, x = case(name, rows)
    linear = prepare_linear(weight, None, x.dtype)
    assert isinstance(linear, TiledLinear)
    assert_near_exact(linear(x), x, weight)


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "Q2_K"])
@pytest.mark.parametrize("splits", [1, 3])
def test_splits_biases_and_gates(monkeypatch: pytest.MonkeyPatch, name: str, splits: int) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    weight, bias = random_ggml(name, 144, 1024), torch.randn(144)
    x = activations(6, 1024, BF16)
    plain = prepare_linear(weight, bias, BF16)(x)
    assert_near_exact(plain, x, weight, bias)
    assert has_gated(weight, BF16)
    linear = prepare_gate_up(weight, bias, BF16, Activation.SILU)
    exact = x.double() @ weight.dequantize().double().t() + bias.double()
    gate, up = exact.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    error = (linear(x).double() - expected).abs()
    assert linear.out_features == 72
    assert (error <= 2**-8 * expected.abs() + 1e-4 * expected.abs().max()).all()


@pytest.mark.parametrize("name", GGML_TYPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_are_looked_up_exactly(name: str, dtype: torch.dtype) -> None:
    weight, _ = case(name, 1)
    table = prepare_table(weight, dtype)
    assert table is not None
    ids = torch.tensor([71, 0, 8, 63, 64, 8, 31, 40])
    expected = weight.rows(ids).dequantize(dtype)
    assert torch.equal(table.rows(ids, dtype), expected)
    assert table.rows(ids[:0], dtype).shape == (0, weight.shape[1])


@pytest.mark.parametrize("name", ["Q3_K", "Q5_1", "IQ4_XS", "Q4_K"])
def test_many_rows_by_a_dense_product(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "choose_slices", lambda *_: (128, 64, 64))
    weight = random_ggml(name, 200, 256)
    x = activations(150, 256, BF16)
    linear = prepare_linear(weight, None, BF16)
    assert isinstance(linear, TiledLinear)
    dense = x.new_empty(136, 256)
    launch.dequantize_rows(linear.weight, 64, dense)
    assert torch.equal(dense, weight.dequantize(BF16)[64:])
    expected = x.double() @ weight.dequantize(BF16).double().t()
    bound = 4e-3 * float(expected.abs().max())
    torch.testing.assert_close(linear(x).double(), expected, rtol=2e-2, atol=bound)


# As in a dense weight of their type, scale and offset are rounded with the code.
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", GGML_TYPES)
def test_many_rows_by_codes_that_take_their_scale(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(launch, "choose_slices", lambda *_: ())
    weight, _ = case(name, 1)
    x = activations(130, weight.shape[1], dtype)
    found = prepare_linear(weight, None, dtype)(x)
    errors = errors_of(found, x, weight.dequantize().double(), None)
    assert errors.found.mean() <= MORE_THAN_DENSE * errors.dense.mean()
    assert errors.found.max() <= 2 * errors.dense.max()


def test_a_table_is_for_packed_blocks_only() -> None:
    weight, _ = case("Q6_K", 1)
    assert prepare_table(weight, torch.float32) is None
    assert prepare_table(torch.ones(8, 8), BF16) is None
