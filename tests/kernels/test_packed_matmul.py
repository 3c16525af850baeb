from __future__ import annotations

import pytest
import torch

from appliance.kernels.packed_matmul import reference
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

pytestmark = pytest.mark.usefixtures("unlike_products")


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


# In any order of sums, rounding the result costs at most 2^-8 of its norm in bfloat16, 2^-11 in
# float16; weights and inputs are rounded too, in all directions.
@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)]
)
def test_in_the_dtype_of_activations(bits: int | None, dtype: torch.dtype, bound: float) -> None:
    weight = torch.randn(48, 96) if bits is None else packed(48, 96, 32, bits=bits)
    bias = torch.randn(48)
    x = activations(6, 96, dtype)
    linear = reference.dense_linear(weight, bias, dtype)
    assert linear(x).dtype == dtype
    assert relative_error(linear(x), exact(x, weight, bias)) < bound
    assert (linear.in_features, linear.out_features) == (96, 48)
    assert linear.nbytes == (48 * 96 + 48) * dtype.itemsize


def test_rows_may_be_a_view() -> None:
    wide, weight = activations(8, 192, torch.bfloat16), packed(32, 96, 32)
    linear = reference.dense_linear(weight, None, torch.bfloat16)
    assert relative_error(linear(wide[:, 96:]), exact(wide[:, 96:], weight)) < 5e-3
