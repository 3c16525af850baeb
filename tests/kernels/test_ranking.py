from __future__ import annotations

import pytest
import torch

from appliance.kernels.sampling.ranking import likeliest


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("levels", [2, 50, 10_000])
def test_equals_come_in_the_order_of_their_ids(levels: int, count: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (5, 300), generator=generator) / levels - 0.7
    scores[1, ::3] = -torch.inf
    scores[2, :9] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 0.0, -0.0, torch.inf])
    expected = scores.sort(dim=-1, descending=True, stable=True)
    values, token_ids = likeliest(scores, count)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(token_ids, expected.indices[:, :count])
