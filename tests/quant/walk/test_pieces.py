"""Weights in pieces, and the search for non-finite numbers in them."""

from __future__ import annotations

import math

import pytest
import torch

from appliance.quant.walk.pieces import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_either_infinity_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    piece = torch.linspace(-1, 1, 3 * 67).to(dtype).reshape(3, 67)
    piece[0, 0], piece[2, 66] = torch.finfo(dtype).min, torch.finfo(dtype).max
    assert all_finite(piece)
    for number in (math.nan, math.inf, -math.inf):
        for place in range(piece.numel()):
            broken = piece.clone()
            broken.view(-1)[place] = number
            assert not all_finite(broken), (number, place)
