"""Launches the gated delta rule: one launch for all rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gated_delta.kernel import gated_delta_kernel
from appliance.kernels.gated_delta.reference import EPSILON

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.state_spans import StateSpans

BLOCK_V = 32  # values of a program: with 128 keys, 32 registers of each thread
NUM_WARPS = 4


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.gated_delta`; grids follow from shapes, so a graph can capture it."""
    num_tokens, num_heads, value_dim = value.shape
    out = value.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out
    assert state.is_contiguous(), state.stride()
    query, key, value = (x if x[0].is_contiguous() else x.contiguous() for x in (query, key, value))
    grid = (len(spans.slots), num_heads, -(-value_dim // BLOCK_V))
    with torch.cuda.device(value.get_device()):
        gated_delta_kernel[grid](
            out,
            query,
            key,
            value,
            log_decay.contiguous(),
            beta.contiguous(),
            state,
            spans.rows,
            spans.lens,
            spans.slots,
            spans.goes_on,
            spans.rows.stride(0),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            num_heads,
            key.shape[2] ** -0.5,
            **constexprs(num_heads // key.shape[1], key.shape[2], value_dim),
            num_warps=NUM_WARPS,
        )
    return out


def constexprs(shared: int, key_dim: int, value_dim: int) -> dict[str, int | float]:
    """Return the compile-time arguments of `gated_delta_kernel`."""
    return {
        "SHARED": shared,
        "KEY_DIM": key_dim,
        "KEY_PADDED": 1 << (key_dim - 1).bit_length(),
        "VALUE_DIM": value_dim,
        "BLOCK_V": BLOCK_V,
        "EPSILON": EPSILON,
    }
