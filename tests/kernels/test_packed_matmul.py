from __future__ import annotations

import logging

import pytest
import torch

from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.kernels.packed_matmul import cpu, reference

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 16, 33, 64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def packed(
    out_features: int,
    in_features: int,
    group_size: int,
    *,
    bits: int = 4,
    kind: OffsetKind = OffsetKind.ADDITIVE,
) -> PackedWeight:
    """Round-to-nearest codes of a normal weight, as a quantizer would make them."""
    random = torch.Generator().manual_seed(out_features + in_features + group_size)
    w = torch.randn(out_features, in_features, generator=random)
    groups = w.view(out_features, -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    q = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, (1 << bits) - 1)
    q = q.view(out_features, in_features).to(torch.uint8)
    offset = low if kind is OffsetKind.ADDITIVE else (-low / scale).round()
    codes = q[:, 0::2] | (q[:, 1::2] << 4) if bits == 4 else q
    return PackedWeight(codes, scale.half(), offset.half(), kind, bits, group_size)


def activations(num_tokens: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, in_features, generator=random).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def exact(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product in float64."""
    if isinstance(weight, PackedWeight):
        weight = weight.dequantize(torch.float64)
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", OffsetKind)
@pytest.mark.parametrize("bits", [4, 8])
def test_reference_is_the_dequantized_product(bits: int, kind: OffsetKind) -> None:
    weight, bias = packed(40, 96, 32, bits=bits, kind=kind), torch.randn(40)
    x = activations(5, 96, torch.float32)
    linear = reference.prepare_linear(weight, bias, torch.float32)
    assert relative_error(linear(x), exact(x, weight, bias)) < 1e-6
    assert (linear.in_features, linear.out_features) == (96, 40)


# Rounding scale and zero to bfloat16 costs 2.0e-3, rounding the product 1.7e-3 and the sum with
# a bias as much again: 2.6e-3 and 3.1e-3. Rounding the offset itself would cost 4.1e-3 alone.
@pytest.mark.parametrize("kind", OffsetKind)
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(576, 576, 32), (192, 576, 64), (64, 1536, 128), (48, 512, 256), (160, 32, 32)],
    ids=lambda n: str(n),
)
def test_int4_stays_packed_and_near_the_exact_product(
    out_features: int, in_features: int, group_size: int, kind: OffsetKind
) -> None:
    weight = packed(out_features, in_features, group_size, kind=kind)
    bias = torch.randn(out_features)
    x = activations(9, in_features, torch.bfloat16)
    for b, bound in ((None, 3.2e-3), (bias, 3.9e-3)):
        linear = cpu.prepare_linear(weight, b, torch.bfloat16)
        assert isinstance(linear, cpu.Int4Linear)
        result = linear(x)
        assert result.dtype == torch.bfloat16
        assert relative_error(result, exact(x, weight, b)) < bound
    assert linear.nbytes <= weight.nbytes + 2 * out_features
    assert (linear.in_features, linear.out_features) == (in_features, out_features)


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)]
)
def test_other_weights_become_dense(bits: int | None, dtype: torch.dtype, bound: float) -> None:
    weight = torch.randn(48, 96) if bits is None else packed(48, 96, 32, bits=bits)
    bias = torch.randn(48)
    x = activations(6, 96, dtype)
    linear = cpu.prepare_linear(weight, bias, dtype)
    assert linear(x).dtype == dtype
    assert relative_error(linear(x), exact(x, weight, bias)) < bound
    assert (linear.in_features, linear.out_features) == (96, 48)
    assert linear.nbytes == (48 * 96 + 48) * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 1e-3), (torch.float32, 1e-6)], ids=["fp16", "fp32"]
)
def test_int4_in_other_dtypes_is_dense_and_exact(dtype: torch.dtype, bound: float) -> None:
    weight = packed(48, 96, 32)
    x = activations(3, 96, dtype)
    linear = cpu.prepare_linear(weight, None, dtype)
    assert not isinstance(linear, cpu.Int4Linear)
    assert relative_error(linear(x), exact(x, weight)) < bound


@pytest.mark.parametrize(("out_features", "group_size"), [(48, 16), (24, 32), (7, 8)])
def test_int4_that_the_kernel_does_not_take_is_dense_and_says_so_once(
    out_features: int, group_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    cpu._log_dense_fallback.cache_clear()
    weight = packed(out_features, 96, group_size)
    x = activations(3, 96, torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            linear = cpu.prepare_linear(weight, None, torch.bfloat16)
    assert [f"groups of {group_size}" in record.getMessage() for record in caplog.records] == [True]
    assert relative_error(linear(x), exact(x, weight)) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weight_kind", ["int4", "int8", "dense"])
def test_a_row_has_the_same_bits_in_any_company(weight_kind: str, dtype: torch.dtype) -> None:
    weights: dict[str, torch.Tensor | PackedWeight] = {
        "int4": packed(192, 576, 32),
        "int8": packed(192, 576, 32, bits=8),
        "dense": torch.randn(192, 576),
    }
    linear = cpu.prepare_linear(weights[weight_kind], torch.randn(192), dtype)
    x = activations(100, 576, dtype)
    together = linear(x)
    for rows in ROW_COUNTS:
        for start in (0, 1, 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), together[part]), (rows, start)


def test_rows_may_be_a_view() -> None:
    wide = activations(8, 192, torch.bfloat16)
    weights: list[torch.Tensor | PackedWeight] = [packed(32, 96, 32), torch.randn(32, 96)]
    for weight in weights:
        linear = cpu.prepare_linear(weight, None, torch.bfloat16)
        assert torch.equal(linear(wide[:, 96:]), linear(wide[:, 96:].contiguous()))
