"""How far FP8 may move a weight, and that its scales are where the format says."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.weights.fp8 import E4M3_MAX
from appliance.quant.formats.scheme import Fp8Scheme
from appliance.quant.methods import fp8
from appliance.quant.methods.fp8 import OCTAVE, WHOLE, quantize

SCHEMES = [Fp8Scheme(), Fp8Scheme(blockwise=True)]


def weights(rows: int = 200, columns: int = 320) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) ** 3
    return weight * torch.logspace(-3, 1, rows).unsqueeze(1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_error_is_a_sixteenth_of_the_weight_or_half_the_least_step(scheme: Fp8Scheme) -> None:
    weight = weights()
    found = quantize(weight, scheme, stretches=WHOLE)
    least = found.row_scales().repeat_interleave(128, 1)[:, : weight.shape[1]] * 2**-9
    bound = torch.maximum(weight.abs() / 16, least / 2) * 1.01
    assert ((found.dequantize() - weight).abs() <= bound).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_are_held_by_the_type_they_are_stored_in(scheme: Fp8Scheme) -> None:
    found = quantize(weights(), scheme)
    assert torch.equal(found.scale, found.scale.to(fp8.STORED).float())
    assert found.scale.shape == ((2, 3) if scheme.blockwise else (200,))


def test_other_places_in_the_octave_lose_less() -> None:
    weight = weights()
    whole, best = (
        (quantize(weight, Fp8Scheme(), stretches=tried).dequantize() - weight).square().sum(1)
        for tried in (WHOLE, OCTAVE)
    )
    assert (best <= whole * (1 + 1e-6)).all()
    assert best.sum() < 0.97 * whole.sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_of_the_grid_are_kept(scheme: Fp8Scheme) -> None:
    grid = torch.arange(-126, 127).to(torch.int8).view(torch.uint8)
    grid = grid[(grid & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()
    weight = torch.cat([grid, torch.tensor([E4M3_MAX])]).repeat(3, 1) * 2.0**-6
    assert torch.equal(quantize(weight, scheme).dequantize(), weight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zeros(scheme: Fp8Scheme) -> None:
    found = quantize(torch.zeros(130, 130), scheme)
    assert torch.isfinite(found.scale).all()
    assert not found.dequantize().any()


def test_blocks_may_be_quantized_in_pieces_of_whole_blocks() -> None:
    scheme, weight = SCHEMES[1], weights(300)
    whole, part = quantize(weight, scheme), quantize(weight[128:], scheme)
    assert torch.equal(part.scale, whole.scale[1:])
    assert torch.equal(part.dequantize(), whole.dequantize()[128:])


def test_outputs_are_searched_and_blocks_keep_the_scale_that_spends_all_codes() -> None:
    weight = weights()
    for scheme, tried in zip(SCHEMES, (OCTAVE, WHOLE), strict=True):
        asked = quantize(weight, scheme, stretches=tried)
        assert torch.equal(quantize(weight, scheme).dequantize(), asked.dequantize())
    largest = weight[:128, :128].abs().max()
    assert quantize(weight, SCHEMES[1]).scale[0, 0] == (largest / E4M3_MAX).to(fp8.STORED)
