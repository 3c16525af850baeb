"""4-bit floats: nearest values, scales, and what GPTQ gains."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.weights.fp4 import VALUES, Fp4Weight
from appliance.quant.formats.scheme import Fp4Scheme
from appliance.quant.methods.fp4 import quantize_linear
from appliance.quant.methods.fp4_grids import choose_floats, nearest, values_of
from appliance.quant.methods.gptq import output_loss

SCHEMES = [Fp4Scheme(has_powers=True), Fp4Scheme()]


def test_the_nearest_value_of_the_standard_is_taken() -> None:
    table = torch.tensor((*VALUES, *(-value for value in VALUES)))
    values = torch.linspace(-7, 7, 2001)
    least = (values[:, None] - table).abs().min(1).values
    assert torch.equal((values_of(nearest(values)) - values).abs(), least)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_that_the_form_holds_come_back(scheme: Fp4Scheme) -> None:
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (8, 64), generator=random)
    codes[:, :: scheme.group_size] = 7  # each group has the largest
    dense = values_of(codes) * 2.0**-6
    found = quantize_linear(dense, None, scheme, torch.bfloat16)
    assert isinstance(found, Fp4Weight)
    torch.testing.assert_close(found.dequantize(), dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_small_and_large_weights_stay_finite(scheme: Fp4Scheme) -> None:
    dense = torch.zeros(4, 64)
    dense[1] = 1e-30
    dense[2] = 1e4
    dense[3, 5] = -3.0
    found = quantize_linear(dense, None, scheme, torch.bfloat16)
    assert isinstance(found, Fp4Weight)
    assert found.is_finite()
    assert torch.equal(found.dequantize()[0], dense[0])
    torch.testing.assert_close(found.dequantize()[2], dense[2], rtol=0.35, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_text_lowers_the_loss_below_that_of_rounding(scheme: Fp4Scheme) -> None:
    random = torch.Generator().manual_seed(2)
    dense = torch.randn(96, 128, generator=random) * 0.02
    inputs = torch.randn(512, 32, generator=random) @ torch.randn(32, 128, generator=random)
    inputs += torch.randn(512, 128, generator=random)
    hessian = inputs.T @ inputs / 512
    losses = []
    for moments in (None, hessian):
        found = quantize_linear(dense, moments, scheme, torch.bfloat16)
        losses.append(output_loss(dense, found.dequantize(), hessian))
    plain = choose_floats(dense, scheme, is_searched=False)
    unsearched = plain.weights(plain.codes(dense))
    assert float((dense - unsearched).square().sum()) > float(
        (dense - quantize_linear(dense, None, scheme, torch.bfloat16).dequantize()).square().sum()
    )
    assert losses[1] < 0.8 * losses[0]
