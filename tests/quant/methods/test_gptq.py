"""The arithmetic of ranges, GPTQ and AWQ, on matrices whose best result is known or bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.errors import QuantizeError
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import awq, gptq, rtn
from appliance.quant.methods.ranges import SHRUNK, WHOLE, choose_steps

SCHEMES = [WeightScheme(4, 32, False), WeightScheme(4, 64, True), WeightScheme(8, 32, False),
           WeightScheme(4, None, False)]  # fmt: skip


def activations(tokens: int = 600, width: int = 128, seed: int = 0) -> torch.Tensor:
    """Correlated inputs, some channels much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn((width, width), generator=generator) * width**-0.5 + torch.eye(width)
    x = torch.randn((tokens, width), generator=generator) @ mixing
    loudness: torch.Tensor = torch.logspace(-1, 1, width)[
        torch.randperm(width, generator=generator)
    ]
    loud: torch.Tensor = x * loudness
    return loud


def weights(rows: int = 48, width: int = 128) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(1)) * 0.1


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def gptq_codes(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: WeightScheme, **settings: Any
) -> PackedWeight:
    found = gptq.quantize(weight, hessian, scheme, **settings).weight
    assert isinstance(found, PackedWeight)
    return found


def error(
    x: torch.Tensor, weight: torch.Tensor, packed: PackedWeight | Fp4Weight | GgmlWeight
) -> float:
    lost = (x.double() @ (weight.double() - packed.dequantize().double()).T).square().sum()
    return float(lost / (x.double() @ weight.double().T).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_whole_ranges_without_importance_are_those_of_rtn(scheme: WeightScheme) -> None:
    weight = weights()
    steps = choose_steps(weight, scheme, torch.bfloat16, shares=WHOLE)
    packed, expected = steps.pack(steps.codes(weight)), rtn.quantize(weight, scheme)
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.scale, expected.scale)
    assert torch.equal(packed.offset, expected.offset)
    assert (packed.bits, packed.group_size) == (expected.bits, expected.group_size)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_steps_mean_what_is_packed(scheme: WeightScheme) -> None:
    weight = weights()
    steps = choose_steps(weight, scheme, torch.float16, shares=SHRUNK)
    codes = steps.codes(weight)
    assert torch.equal(steps.pack(codes).dequantize(), steps.weights(codes))
    last = slice(-(scheme.group_size or 128), None)
    group = steps.scale.shape[1] - 1
    assert torch.equal(steps.codes(weight[:, last], group), codes[:, last])
    assert torch.equal(steps.weights(codes[:, last], group), steps.weights(codes)[:, last])


def test_ranges_are_cut_where_that_lowers_the_weighted_error() -> None:
    weight, scheme = weights(), WeightScheme(4, 64, False)
    weight[:, 5] *= 20  # an outlier whose input is always 0
    energy = torch.ones(128)
    energy[5] = 0.0

    def lost(shares: tuple[float, ...]) -> float:
        steps = choose_steps(weight, scheme, torch.bfloat16, importance=energy, shares=shares)
        back = steps.weights(steps.codes(weight))
        return float(((back - weight).square() * energy).sum())

    assert lost(SHRUNK) < 0.5 * lost(WHOLE)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_loses_less_than_rounding(scheme: WeightScheme) -> None:
    x, weight = activations(), weights()
    result = gptq.quantize(weight, hessian_of(x), scheme)
    found = error(x, weight, result.weight)
    assert found < 0.6 * error(x, weight, rtn.quantize(weight, scheme))
    loss = gptq.output_loss(weight, result.weight.dequantize(), hessian_of(x))
    assert loss == pytest.approx(found, rel=1e-3)
    assert result.damping == gptq.DAMPING
    other = activations(seed=2) @ torch.eye(128)
    assert torch.isfinite(other @ result.weight.dequantize().T).all()


def test_without_correlation_gptq_rounds_to_scales_that_fit() -> None:
    weight, scheme = weights(), WeightScheme(4, 32, False)
    found = gptq_codes(weight, torch.eye(128), scheme, shares=WHOLE).dequantize()
    rounded = rtn.quantize(weight, scheme).dequantize()
    errors = [(part - weight).view(48, 4, 32).square().sum(-1) for part in (found, rounded)]
    assert bool((errors[0] <= errors[1] * 1.001).all()), "of each group"
    assert float(errors[0].sum()) < 0.97 * float(errors[1].sum())


def test_the_same_inputs_give_the_same_bits() -> None:
    hessian, weight = hessian_of(activations()), weights()
    first, second = (gptq_codes(weight, hessian, SCHEMES[0]) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)


def test_inputs_that_are_never_seen_are_rounded_and_nothing_breaks() -> None:
    x, weight, scheme = activations(), weights(), WeightScheme(4, 32, False)
    x[:, 32:64] = 0
    found = gptq_codes(weight, hessian_of(x), scheme)
    silent = slice(32, 64)
    rounded = rtn.quantize(weight, scheme).dequantize()
    errors = [(part - weight)[:, silent].square().sum(1) for part in (found.dequantize(), rounded)]
    assert bool((errors[0] <= errors[1] * 1.001).all()), "of each row"


def test_fewer_tokens_than_inputs_are_damped_for_as_long_as_it_takes() -> None:
    result = gptq.quantize(
        weights(), hessian_of(activations(20)), SCHEMES[0], damping=0.0, doubt=0.0
    )
    assert 0 < result.damping <= 1


def test_what_few_tokens_say_of_inputs_together_is_half_believed() -> None:
    seen, fresh, weight = activations(160), activations(4000, seed=0), weights()
    hessian = hessian_of(seen)

    def lost(doubt: float) -> float:
        return error(
            fresh[160:], weight, gptq.quantize(weight, hessian, SCHEMES[0], doubt=doubt).weight
        )

    assert lost(0.4) < 0.9 * lost(0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    hessian = hessian_of(activations())
    hessian[3, 4] = value
    with pytest.raises(QuantizeError, match="NaN or infinity"):
        gptq.quantize(weights(), hessian, SCHEMES[0])


def test_scales_of_inputs_lower_the_loss_and_name_it() -> None:
    x, weight, scheme = activations(), weights(), WeightScheme(4, 64, False)
    chosen = awq.choose_scales([weight[:20], weight[20:]], hessian_of(x), x.abs().mean(0), scheme)
    assert chosen.exponent > 0
    scaled = rtn.quantize(weight * chosen.scales, scheme).dequantize() / chosen.scales
    lost = (x @ (scaled - weight).T).square().sum()
    plain = (x @ (rtn.quantize(weight, scheme).dequantize() - weight).T).square().sum()
    assert chosen.loss == pytest.approx(float(lost / plain), rel=1e-3)
    assert chosen.loss < 0.9


def test_heads_of_one_source_share_their_scales() -> None:
    x, weight = activations(), weights()
    chosen = awq.choose_scales(
        [weight], hessian_of(x), x.abs().mean(0), WeightScheme(4, 32, False), sources=2, head_dim=16
    )
    heads = chosen.scales.view(2, 4, 16)
    assert torch.equal(heads, heads[:, :1].expand_as(heads))
    assert not torch.equal(heads[0, 0], heads[1, 0])
