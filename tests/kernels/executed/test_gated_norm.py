from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.kernels.gated_norm.launch import gated_norm
from appliance.kernels.gated_norm.reference import gated_norm as by_torch
from appliance.kernels.norm_rope.weights import NormWeights

# Heads of the gated delta rule; groups of Mamba-2, whose heads add what they read.
DELTA: dict[str, Any] = {"width": 48, "gates_first": False}
MAMBA: dict[str, Any] = {"width": 96, "gates_first": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "form", "skips"), [(1, DELTA, False), (5, MAMBA, True)])
def test_it_is_that_of_torch(
    rows: int, form: dict[str, Any], skips: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(rows)
    dim, heads = 1152, 24
    x = torch.randn(rows, dim, generator=random)
    wide = torch.randn(rows, dim + 32, generator=random)
    gate = wide.to(dtype)[:, 16:-16]
    weight = torch.randn(dim if skips else form["width"], generator=random)
    skip = (wide[:, 32:].unflatten(1, (heads, -1)), torch.randn(heads, generator=random))
    norm = NormWeights(weight, 1e-5)
    given = (x, gate, norm, dtype)
    found = gated_norm(*given, **form, skip=skip if skips else None)
    assert found.dtype == dtype
    expected = by_torch(*given, **form, skip=skip if skips else None)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5)
