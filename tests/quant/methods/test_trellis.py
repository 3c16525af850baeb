"""The trellis method beside GPTQ, on inputs whose correlations matter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from appliance.errors import QuantizeError
from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.quant.methods import gptq, trellis


def correlated(width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn((width, width), generator=generator) * width**-0.5 + torch.eye(width)
    loudness = torch.logspace(-0.5, 0.5, width)[torch.randperm(width, generator=generator)]
    x: torch.Tensor = torch.randn((2000, width), generator=generator) @ mixing * loudness
    return x.T @ x / len(x)


def loss(weight: torch.Tensor, found: torch.Tensor, moments: torch.Tensor) -> float:
    return gptq.output_loss(weight, found, moments)


WEIGHT = torch.randn((192, 128), generator=torch.Generator().manual_seed(1)) * 0.1
MOMENTS = correlated(128, 2)


@pytest.mark.parametrize(("bits", "share"), [(3, 0.75), (4, 0.75)])
def test_loses_less_than_gptq_with_more_bits_of_scales(bits: int, share: float) -> None:
    coded = trellis.quantize(WEIGHT, MOMENTS, bits, doubt=0.0)
    scheme = WeightScheme(bits, 64, symmetric=False)
    grouped = gptq.quantize(WEIGHT, MOMENTS, scheme, doubt=0.0).weight
    ours = loss(WEIGHT, coded.dequantize(), MOMENTS)
    assert ours < share * loss(WEIGHT, grouped.dequantize(), MOMENTS)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_feedback_helps_and_bits_help(bits: int) -> None:
    scheme = TrellisScheme(bits)
    alone = trellis.quantize_linear(WEIGHT, None, scheme, torch.bfloat16)
    fed = trellis.quantize_linear(WEIGHT, MOMENTS, scheme, torch.bfloat16)
    assert alone.bits == fed.bits == bits
    assert loss(WEIGHT, fed.dequantize(), MOMENTS) < loss(WEIGHT, alone.dequantize(), MOMENTS)
    # Without inputs the error is that of a normal source, 6 dB a bit.
    plain = float((WEIGHT - alone.dequantize()).square().mean() / WEIGHT.square().mean())
    assert 4.0**-bits < plain < 1.6 * 4.0**-bits


def test_outputs_that_fill_no_block_and_rows_of_zeros() -> None:
    weight = torch.cat((WEIGHT[:70], torch.zeros(2, 128)))
    found = trellis.quantize(weight, MOMENTS, 4).dequantize()
    assert found.shape == weight.shape
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[70:], torch.zeros(2, 128))


def test_threads_quantize_at_once_as_one_after_another() -> None:
    seeds = range(8)
    weights = [torch.randn((64, 64), generator=torch.Generator().manual_seed(s)) for s in seeds]

    def coded(weight: torch.Tensor) -> torch.Tensor:
        return trellis.quantize_linear(weight, None, TrellisScheme(4), torch.bfloat16).symbols

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(coded, weights))
    assert all(map(torch.equal, together, map(coded, weights)))


def test_moments_that_are_not_finite_are_refused() -> None:
    with pytest.raises(QuantizeError, match="NaN or infinity"):
        trellis.quantize(WEIGHT, MOMENTS * torch.nan, 4)
