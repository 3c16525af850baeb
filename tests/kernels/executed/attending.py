"""Attention of a case by the kernels, alone or against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.paged_attention import reference
from appliance.kernels.paged_attention.launch import paged_attention, plan_attention

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest error, as a share of the largest result, in reference arithmetic of float64. Weights are
# rounded to the dtype of the products, so it is about one unit in the last place of that.
BOUNDS = {BF16: 8e-3, FP16: 1e-3, FP32: 5e-6}


def attend(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    work = plan_attention(case.batch, case.cache.block_size)
    return paged_attention(
        case.query,
        case.cache,
        work,
        scale=scale or case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def assert_matches_reference(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    bound: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    found = attend(case, window, softcap, sinks, scale)
    assert found.dtype == case.query.dtype
    expected = reference.paged_attention(
        case.query.double(),
        case.cache,
        case.batch,
        scale=scale or case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (bound or BOUNDS[case.query.dtype])  # NaN is not
