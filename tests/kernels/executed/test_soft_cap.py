from __future__ import annotations

import pytest
import torch

from appliance.kernels.soft_cap.launch import soft_cap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5000), (3, 33), (0, 64)])
def test_cap_is_that_of_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = (torch.randn(shape) * 40).to(dtype)
    found = soft_cap(logits, 30.0)
    assert found.dtype == torch.float32
    expected = 30.0 * torch.tanh(logits.double() / 30.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=5e-6)


def test_order_and_what_is_broken_survive() -> None:
    logits = torch.tensor([[-torch.inf, -3.0, -0.0, 0.0, 1e-3, 3.0, 50.0, torch.inf]])
    found = soft_cap(logits, 30.0)
    assert torch.equal(found, found.sort().values)
    assert found[0, [0, -1]].tolist() == [-30.0, 30.0]
    assert soft_cap(torch.tensor([[torch.nan, 1.0]]), 30.0).isnan().tolist() == [[True, False]]
