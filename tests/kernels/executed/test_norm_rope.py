from __future__ import annotations

import pytest
import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.norm_rope import reference
from appliance.kernels.norm_rope.launch import add_rms_norm, rms_norm

# Several rows in a program, one row in a program, a width that is no power of two, the widest.
SIZES = [(5, 64), (3, 96), (2, 576), (3, 4096), (1, 16384), (1, 33)]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one rounding


@pytest.mark.parametrize(("num_rows", "dim"), SIZES)
@pytest.mark.parametrize("dtype", list(STEP))
def test_norm_is_that_of_float64(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(num_rows, dim + 8) * 3).to(dtype)[:, :dim]  # rows of a wider tensor
    weight = torch.rand(dim)
    wide = x.double()
    factor = (wide.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), wide * factor * weight.double(), rtol=STEP[dtype], atol=1e-6
    )


@pytest.mark.parametrize(("num_rows", "dim"), SIZES[:4])
@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("in_place", [False, True])
def test_residual_is_added_and_rounded_before_the_norm(
    num_rows: int, dim: int, dtype: torch.dtype, in_place: bool
) -> None:
    x, residual = torch.randn(num_rows, dim).to(dtype), torch.randn(num_rows, dim).to(dtype)
    weight = torch.rand(dim)
    _, expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6, in_place=in_place)
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-6))
    assert (total is residual) == in_place
    assert torch.equal(residual, expected if in_place else before)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = torch.randn(7, 128).bfloat16(), torch.rand(128)
    together = rms_norm(x, weight, 1e-5)
    for row in range(7):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_zeros_and_no_rows_pass() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6), torch.zeros(2, 64))
    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6).shape == (0, 64)


def test_heads_are_normed_one_by_one() -> None:
    x, weight = torch.randn(3, 4, 64), torch.rand(64)
    found = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)


def test_what_no_kernel_covers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="up to 16384"):
        rms_norm(torch.zeros(1, 16385), torch.ones(16385), 1e-6)
    with pytest.raises(UnsupportedModelError, match="float64"):
        rms_norm(torch.zeros(1, 64, dtype=torch.float64), torch.ones(64), 1e-6)
