from __future__ import annotations

import pytest
import torch

from appliance.kernels.kv_page.codes import hadamard, hadamard_size, quantize_int4


def test_int4_stores_what_it_quantized_with() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    codes, scales, offsets = quantize_int4(x)
    restored = (codes.double() - 8) * scales.double().unsqueeze(1) + offsets.double().unsqueeze(1)
    assert codes.unique().tolist() == list(range(16))
    assert ((restored - x.double()).abs() <= 0.51 * scales.double().unsqueeze(1)).all()
    assert (quantize_int4(torch.full((1, 8), 3.0))[0] == 8).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_the_hadamard_transform_keeps_products(head_dim: int) -> None:
    x, y = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(0)).double()
    rotated = hadamard(x).double() @ hadamard(y).double().T
    torch.testing.assert_close(rotated, x @ y.T, atol=1e-5, rtol=0)
    outlier = torch.zeros(1, head_dim)
    outlier[0, 3] = 1.0
    size = hadamard_size(head_dim)
    assert hadamard(outlier).abs().max() == pytest.approx(size**-0.5)
