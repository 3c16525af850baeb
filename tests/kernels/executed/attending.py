"""Attention of a case by the kernels, alone or against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention import reference
from appliance.kernels.attention.launch import paged_attention, plan_attention
from appliance.kernels.attention.variant import FP8_CAPABILITY, WIDEST_WHOLE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.target import target_of

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest error, as a share of the largest result, in reference arithmetic of float64. Weights are
# rounded to the dtype of the products, so it is about one unit in the last place of that.
BOUNDS = {BF16: 8e-3, FP16: 1e-3, FP32: 5e-6}
# The same where E4M3 is multiplied: queries and weights are rounded to 4 significant bits.
E4M3_BOUND = 2**-4


def attend(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    sees: torch.Tensor | None = None,
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
        sees=sees,
    )


def assert_matches_reference(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    bound: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    sees: torch.Tensor | None = None,
) -> None:
    found = attend(case, window, softcap, sinks, scale, sees)
    assert found.dtype == case.query.dtype
    expected = reference.paged_attention(
        case.query.double(),
        case.cache,
        case.batch,
        scale=scale or case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
        sees=sees,
    )
    error = (found.double() - expected).abs().amax((1, 2)) / expected.abs().max()
    bounds = torch.full_like(error, bound or BOUNDS[case.query.dtype])
    if multiplies_e4m3(case):
        bounds[case.batch.query_start[case.batch.num_decodes] :] = E4M3_BOUND
    assert (error < bounds).all()  # NaN is not


def multiplies_e4m3(case: Case) -> bool:
    """Whether chunks of a case are multiplied in E4M3 by the GPU that the test stands for."""
    target = target_of(case.query.device)
    is_fp8 = case.cache.format is KVFormat.FP8 and case.query.dtype is not FP32
    has_products = not target.is_interpreted and target.capability >= FP8_CAPABILITY
    return is_fp8 and has_products and case.cache.head_dim <= WIDEST_WHOLE
