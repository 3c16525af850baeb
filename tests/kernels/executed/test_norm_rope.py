from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from appliance.errors import UnsupportedModelError
from appliance.kernels.norm_rope import reference
from appliance.kernels.norm_rope.launch import add_norm, layer_norm, rms_norm
from appliance.kernels.norm_rope.weights import NormWeights

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


@pytest.mark.parametrize(("num_rows", "dim"), SIZES)
@pytest.mark.parametrize("dtype", list(STEP))
def test_layer_norm_is_that_of_float64(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(num_rows, dim) * 3 + 5).to(dtype)
    weight, bias = torch.rand(dim), torch.randn(dim)
    expected = functional.layer_norm(x.double(), (dim,), weight.double(), bias.double(), 1e-5)
    found = layer_norm(x, weight, bias, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=STEP[dtype], atol=4 * STEP[dtype])


@pytest.mark.parametrize(("num_rows", "dim"), SIZES[:4])
@pytest.mark.parametrize("dtype", list(STEP))
def test_the_stream_is_added_and_rounded_before_the_norm(
    num_rows: int, dim: int, dtype: torch.dtype
) -> None:
    x, stream = torch.randn(2, num_rows, dim).to(dtype)
    norm = NormWeights(torch.rand(dim), 1e-6)
    normed, total = add_norm(x, stream, norm)
    assert torch.equal(total, x + stream)
    assert normed is not None
    assert torch.equal(normed, rms_norm(total, norm.weight, 1e-6))


# Norms before the sum, an MLP beside the mixer, a LayerNorm, several norms, a scale; none at all.
FORMS: dict[str, Any] = {
    "post": {"post": 1},
    "beside": {"beside": True},
    "scaled": {"scale": 0.7},
    "centered": {"bias": True, "beside": True},
    "three": {"count": 3, "post": 1, "beside": True, "parts": True, "scale": 1.3},
    "without": {"norm": False, "post": 1},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [64, 640])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_every_form(form: str, dim: int, dtype: torch.dtype) -> None:
    settings = FORMS[form]
    torch.manual_seed(0)
    wide = torch.randn(3, 5, dim + 8).to(dtype)
    x, stream, beside = wide[..., :dim]  # rows of a wider tensor
    shape = (3, dim) if "count" in settings else (dim,)
    weight, bias = torch.rand(shape) + 0.5, torch.randn(dim) if "bias" in settings else None
    norm = NormWeights(weight, 1e-6, bias) if settings.get("norm", True) else None
    own = [NormWeights(torch.rand(dim) + 0.5, 1e-5) for _ in range(3)]
    arguments: dict[str, Any] = {
        "post": own[0] if "post" in settings else None,
        "beside": beside if "beside" in settings else None,
        "parts": (own[1], own[2]) if "parts" in settings else None,
        "scale": settings.get("scale"),
    }
    found, total = add_norm(x, stream, norm, **arguments)
    expected, same = reference.add_norm_with(reference.rms_norm)(x, stream, norm, **arguments)
    # Sums of squares differ in their last bits, so a rounding may fall the other way.
    step = 2 * STEP[dtype]
    torch.testing.assert_close(total, same, rtol=step, atol=step)
    assert (found is None) == (expected is None) == (norm is None)
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, rtol=2 * step, atol=2 * step)


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
