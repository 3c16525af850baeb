"""Launches the short convolution: one launch for all rows of a step, which a graph can capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.short_conv.kernel import short_conv_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.rows.state_spans import StateSpans


WARPS = 4
# Of a program: 16 bytes a thread of bfloat16 rows. The first block of a sequence's rows alone reads
# the state, so it has at least as many rows as the state where there is a second one.
_DECODE = (1, 1024)
_PROMPT = (16, 128)
_launch_short_conv = Launcher(short_conv_kernel)


def conv_constexprs(taps: int, longest: int, *, activates: bool) -> dict[str, int]:
    """Return the compile-time arguments for spans of at most so many rows."""
    block_t, block_w = _DECODE if longest == 1 else _PROMPT
    assert longest == 1 or taps <= block_t, taps
    return {"TAPS": taps, "ACTIVATES": activates, "BLOCK_T": block_t, "BLOCK_W": block_w}


def short_conv(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    state: Tensor,
    spans: StateSpans,
    *,
    activates: bool = False,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `reference.short_conv`; the grid follows from shapes, and nothing is read back."""
    num_tokens, width = x.shape
    dtype = torch.float32 if gates is None else x.dtype
    out = torch.empty(num_tokens, width, dtype=dtype, device=x.device)
    if not num_tokens:
        return out
    assert state[0].is_contiguous(), state.stride()
    before, after = gates or (None, None)
    if x.stride(1) != 1 or any(gate.stride() != x.stride() for gate in gates or ()):
        x = x.contiguous()
        before, after = (None if gate is None else gate.contiguous() for gate in (before, after))
    fixed = conv_constexprs(filters.shape[1], spans.longest, activates=activates)
    blocks = -(-spans.longest // fixed["BLOCK_T"])
    grid = (len(spans.slots), blocks, -(-width // fixed["BLOCK_W"]))
    with device_of(x):
        _launch_short_conv(
            grid,
            (
                out,
                x,
                before,
                after,
                filters.contiguous(),
                bias,
                state,
                spans.firsts,
                spans.lens,
                spans.slots,
                spans.goes_on,
                spans.firsts.stride(0),
                x.stride(0),
                state.stride(0),
                width,
            ),
            {**fixed, "num_warps": WARPS, "num_stages": 1},
        )
    return out
