"""Launches the selective scan: one launch for all rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.selective_scan.kernel import selective_scan_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.state_spans import StateSpans

BLOCK_V = 32  # values of a program: with a state of 128, 32 registers of each thread
NUM_WARPS = 4
MAX_REGISTERS = 96  # without a cap ptxas aims at 64, and spills two


def selective_scan(
    value: Tensor,
    key: Tensor,
    query: Tensor,
    size: Tensor,
    rates: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.selective_scan`; grids follow from shapes, so a graph can capture it."""
    num_tokens, num_heads, head_dim = value.shape
    out = value.new_empty(num_tokens, num_heads, head_dim)
    if not num_tokens:
        return out
    assert state.is_contiguous(), state.stride()
    value, key, query = (x if x[0].is_contiguous() else x.contiguous() for x in (value, key, query))
    grid = (len(spans.slots), num_heads, -(-head_dim // BLOCK_V))
    with torch.cuda.device(value.get_device()):
        selective_scan_kernel[grid](
            out,
            value,
            key,
            query,
            size.contiguous(),
            rates,
            state,
            spans.rows,
            spans.lens,
            spans.slots,
            spans.goes_on,
            spans.rows.stride(0),
            value.stride(0),
            key.stride(0),
            query.stride(0),
            num_heads,
            **constexprs(num_heads // key.shape[1], key.shape[2], head_dim),
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )
    return out


def constexprs(shared: int, state_dim: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `selective_scan_kernel`."""
    return {
        "SHARED": shared,
        "STATE_DIM": state_dim,
        "STATE_PADDED": 1 << (state_dim - 1).bit_length(),
        "HEAD_DIM": head_dim,
        "BLOCK_V": BLOCK_V,
    }
