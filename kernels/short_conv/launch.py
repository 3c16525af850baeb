"""Launches the short convolution: one launch for all rows of a step, which a graph can capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.short_conv.kernel import short_conv_kernel
from appliance.kernels.short_conv.variant import WARPS, conv_constexprs

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.state_spans import StateSpans


def short_conv(
    x: Tensor, filters: Tensor, bias: Tensor | None, state: Tensor, spans: StateSpans
) -> Tensor:
    """See `reference.short_conv`; the grid follows from shapes, and nothing is read back."""
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, width, device=x.device)
    if not num_tokens:
        return out
    assert state[0].is_contiguous(), state.stride()
    if x.stride(1) != 1:
        x = x.contiguous()
    fixed = conv_constexprs(filters.shape[1], spans.longest)
    blocks = -(-spans.longest // fixed["BLOCK_T"])
    grid = (len(spans.slots), blocks, -(-width // fixed["BLOCK_W"]))
    with torch.cuda.device(x.get_device()):
        short_conv_kernel[grid](
            *(out, x, filters.contiguous(), bias, state),
            *(spans.firsts, spans.lens, spans.slots, spans.goes_on),
            *(spans.firsts.stride(0), x.stride(0), state.stride(0), width),
            **fixed,
            num_warps=WARPS,
            num_stages=1,
        )
    return out
