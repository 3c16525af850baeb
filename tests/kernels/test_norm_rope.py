from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from appliance.kernels.norm_rope import cpu, reference
from appliance.kernels.norm_rope.weights import NormWeights

SIZES = [(1, 576), (16, 640), (5, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one rounding


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def angles(num_tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    turned = torch.arange(num_tokens).unsqueeze(1) * frequencies
    return turned.cos(), turned.sin()


@pytest.mark.parametrize(("num_tokens", "dim"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_tokens, dim).to(dtype) * 3, torch.rand(dim)
    expected = functional.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
    for implementation in (reference, cpu):
        result = implementation.rms_norm(x, weight, 1e-5)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=STEP[dtype], atol=1e-6)


@pytest.mark.parametrize("implementation", [reference, cpu])
def test_rms_norm_of_zeros_is_zero(implementation: object) -> None:
    result = implementation.rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6)  # type: ignore[attr-defined]
    assert torch.equal(result, torch.zeros(2, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, stream, weight = torch.randn(3, 96).to(dtype), torch.randn(3, 96).to(dtype), torch.rand(96)
    for rms_norm in (reference.rms_norm, cpu.rms_norm):
        norm = NormWeights(weight, 1e-5)
        normed, total = reference.add_norm_with(rms_norm)(x, stream, norm)
        assert torch.equal(total, x + stream)
        assert normed is not None
        assert torch.equal(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (256, 256)])
def test_rotary_is_a_complex_product(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    half = rotary_dim // 2
    x = torch.randn(7, 3, head_dim).to(dtype)
    cos, sin = angles(7, half)
    turned = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = turned * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    for implementation in (reference, cpu):
        result = implementation.rotary(x, cos, sin)
        assert result.dtype == dtype
        assert torch.equal(result[..., rotary_dim:], x[..., rotary_dim:])
        torch.testing.assert_close(result.double(), expected, rtol=STEP[dtype], atol=1e-6)


def test_rotary_leaves_its_input_and_takes_views() -> None:
    fused = torch.randn(4, 5 * 64)
    x = fused[:, 64:].view(4, 4, 64)
    cos, sin = angles(4, 32)
    before = fused.clone()
    assert torch.equal(cpu.rotary(x, cos, sin), cpu.rotary(x.contiguous(), cos, sin))
    assert torch.equal(fused, before)
