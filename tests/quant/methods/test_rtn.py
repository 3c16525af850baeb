"""How far rounding to nearest may move a weight, and which weights it must not move."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind
from appliance.quant.formats.scheme import Fp4Scheme, LinearScheme, TrellisScheme, WeightScheme
from appliance.quant.methods import data_free
from appliance.quant.methods.rtn import quantize
from appliance.quant.run.options import FP4_METHODS, Method

SCHEMES = [
    WeightScheme(bits, group_size, symmetric)
    for bits, group_size, symmetric in product((4, 8), (32, 128, None), (True, False))
]
schemes = st.sampled_from(SCHEMES)
scale_dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**32 - 1)


def heavy_tailed(seed: int, rows: int = 6, columns: int = 256, size: float = 0.05) -> Tensor:
    """Weights with outliers, groups far from zero and groups of one sign."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) ** 3 * size
    weight[1] += 3 * size
    weight[2] = -weight[2].abs()
    weight[3, :128] = 0
    return weight


def steps_off(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> Tensor:
    """Error of every weight in steps of its group, (rows, groups, group_size)."""
    packed = quantize(weight, scheme, scale_dtype)
    shape = (*packed.scale.shape, packed.group_size)
    error = (packed.dequantize() - weight).view(shape)
    return error / packed.scale.float().abs().unsqueeze(-1)


def rounding_of_scale(scheme: WeightScheme) -> float:
    """Error, in steps, of a range of all codes whose scale is rounded to bfloat16."""
    return scheme.max_code * 2**-8 + 1e-3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_arrays_without_torch_give_the_same_codes(scheme: WeightScheme) -> None:
    weight = heavy_tailed(7)
    by_torch, by_numpy = quantize(weight, scheme), quantize(arrays.of_numpy(weight.numpy()), scheme)
    assert isinstance(by_numpy.codes, arrays.HostArray)
    for name in ("codes", "scale", "offset"):
        assert torch.equal(arrays.in_torch(getattr(by_numpy, name)), getattr(by_torch, name)), name


@given(schemes, scale_dtypes, seeds)
@settings(derandomize=True)
def test_the_error_is_half_a_step(
    scheme: WeightScheme, scale_dtype: torch.dtype, seed: int
) -> None:
    weight = heavy_tailed(seed)
    off = steps_off(weight, scheme, scale_dtype)
    bound = 0.5 + rounding_of_scale(scheme)
    if scheme.symmetric:
        # The sign of the farthest weight has one code more than the other sign, which may be
        # clamped.
        groups = weight.view(off.shape)
        farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        assert off.abs().max() <= 1 + rounding_of_scale(scheme)
        off = off[groups.sign() == farthest.sign().expand_as(groups)]
    assert off.abs().max() <= bound


@given(st.sampled_from([s for s in SCHEMES if s.symmetric]), seeds)
@settings(derandomize=True)
def test_symmetric_keeps_the_farthest_weight_of_each_group(scheme: WeightScheme, seed: int) -> None:
    weight = heavy_tailed(seed)
    packed = quantize(weight, scheme)
    shape = (*packed.scale.shape, packed.group_size)
    groups, found = weight.view(shape), packed.dequantize().view(shape)
    index = groups.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(
        found.gather(-1, index), groups.gather(-1, index), rtol=2**-8, atol=0
    )


@given(st.sampled_from([s for s in SCHEMES if s.symmetric]), seeds)
@settings(derandomize=True)
def test_what_was_quantized_symmetrically_is_not_changed_again(
    scheme: WeightScheme, seed: int
) -> None:
    once = quantize(heavy_tailed(seed), scheme).dequantize()
    assert torch.equal(quantize(once, scheme).dequantize(), once)


@given(st.sampled_from([s for s in SCHEMES if not s.symmetric]), st.integers(0, 15), seeds)
@settings(derandomize=True)
def test_asymmetric_keeps_weights_that_lie_on_a_grid(
    scheme: WeightScheme, zero_point: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, scheme.max_code + 1, (4, 256), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, scheme.max_code  # every group uses its whole range
    weight = (codes - zero_point) * 2.0**-6
    assert torch.equal(quantize(weight, scheme).dequantize(), weight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40])
def test_groups_of_nothing_stay_finite(scheme: WeightScheme, value: float) -> None:
    packed = quantize(torch.full((2, 256), value), scheme)
    assert torch.isfinite(packed.scale).all()
    assert packed.dequantize().abs().max() <= abs(value)


def test_the_codes_fit_the_scale_that_is_stored() -> None:
    weight = heavy_tailed(0)
    packed = quantize(weight, WeightScheme(8, 32, symmetric=False), torch.bfloat16)
    assert packed.scale.dtype == packed.offset.dtype == torch.bfloat16
    inside = (packed.unpack() > 0) & (packed.unpack() < 255)
    error = (packed.dequantize() - weight).abs().view(6, -1, 32)
    allowed = packed.scale.float().unsqueeze(-1) * 0.5001
    assert (error <= allowed).view(6, 256)[inside].all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_offset_says_what_it_is(symmetric: bool) -> None:
    packed = quantize(heavy_tailed(1), WeightScheme(4, 64, symmetric))
    if symmetric:
        assert packed.offset_kind is OffsetKind.ADDITIVE
        assert torch.equal(packed.offset, -8 * packed.scale)
    else:
        assert packed.offset_kind is OffsetKind.ZERO_POINT
        assert torch.equal(packed.offset, packed.offset.round().clamp(0, 15))


def test_rows_are_independent_so_a_weight_may_be_quantized_in_pieces() -> None:
    weight, scheme = heavy_tailed(2), WeightScheme(4, 32)
    whole = quantize(weight, scheme)
    part = quantize(weight[2:5], scheme)
    assert torch.equal(part.codes, whole.codes[2:5])
    assert torch.equal(part.scale, whole.scale[2:5])


def test_bfloat16_weights_are_taken_as_they_are() -> None:
    weight = heavy_tailed(3).bfloat16()
    scheme = WeightScheme(4, 64)
    assert torch.equal(quantize(weight, scheme).codes, quantize(weight.float(), scheme).codes)


def test_a_method_that_is_only_named_does_not_round() -> None:
    with pytest.raises(NotImplementedError, match="--method open is named, but nothing quantizes"):
        data_free.quantize(heavy_tailed(0), SCHEMES[0], Method.OPEN, torch.bfloat16)


def test_a_method_whose_file_is_missing_does_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Method.RTN, "traits", replace(Method.RTN.traits, file="nowhere"))
    with pytest.raises(NotImplementedError, match="--method rtn is named, but nothing quantizes"):
        data_free.quantize(heavy_tailed(0), SCHEMES[0], Method.RTN, torch.bfloat16)


@pytest.mark.parametrize(
    "method",
    [method for method in Method if method is not Method.OPEN],
    ids=lambda method: method.value,
)
def test_every_method_of_the_list_quantizes(method: Method) -> None:
    weight = heavy_tailed(0)
    hessian = torch.eye(weight.shape[1]) if method.needs_text else None
    scheme: LinearScheme = TrellisScheme(4) if method is Method.TRELLIS else SCHEMES[0]
    if method in FP4_METHODS:
        scheme = Fp4Scheme(has_powers=method is Method.MXFP4)
    packed = method.quantizer(weight, hessian, scheme, torch.bfloat16)
    assert packed.shape == tuple(weight.shape)
    most = 0.3 if method not in FP4_METHODS else float(weight.abs().max()) / 4  # a step at the top
    assert float((packed.dequantize() - weight).abs().max()) < most
