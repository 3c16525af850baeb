"""Causal convolution of each channel, as Mamba (arXiv 2312.00752) and LFM2 use it, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.rows.state_spans import StateSpans


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
    """Convolve the rows of each sequence with the inputs that it keeps from earlier steps.

    Args:
        x: (num_tokens, width).
        filters: (width, taps) float32; the last tap is for the row itself.
        bias: (width,) float32.
        state: (num_slots, taps - 1, width), inputs before a sequence's next row; updated.
        spans: the rows of each sequence.
        activates: return silu of the sums.
        gates: like x; they multiply x, and the sums, which are rounded as x is before.

    Returns:
        (num_tokens, width) float32; with gates of the dtype of x.
    """
    if gates is not None:
        x = gates[0] * x
    taps = filters.shape[1]
    history = torch.cat((spans.read(state), spans.side_by_side(x.float())), dim=1)
    total = sum(history[:, tap : tap + spans.longest] * filters[:, tap] for tap in range(taps))
    assert isinstance(total, torch.Tensor)
    latest = spans.lens.unsqueeze(1) + torch.arange(taps - 1, device=x.device)
    spans.write(state, history.gather(1, latest.unsqueeze(2).expand(-1, -1, x.shape[1])))
    found = spans.in_turn(total if bias is None else total + bias)
    if activates:
        found = silu(found)
    return found if gates is None else gates[1] * found.to(x.dtype)
