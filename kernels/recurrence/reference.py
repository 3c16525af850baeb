"""Recurrent layers, row after row, in float32; states may be kept in 16 bits between steps.

Gated delta rule: Gated Delta Networks (arXiv 2412.06464).
Selective scan: Mamba-2 (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from appliance.kernels.recurrence.variant import EPSILON

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.rows.state_spans import StateSpans


def selective_scan(
    value: Tensor,
    key: Tensor,
    query: Tensor,
    step: Tensor,
    rates: Tensor,
    bias: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """Read a state that maps keys to values, after each row has decayed it and added to it.

    With size = softplus(step + bias): S = exp(-rate * size) S + k (size v)^T; out = S^T q. Adjacent
    heads share a group's key and query.

    Args:
        value: (num_tokens, num_heads, head_dim) float32; the paper calls it X.
        key: (num_tokens, num_groups, state_dim) float32; B.
        query: the same; C.
        step: (num_tokens, num_heads), any float dtype, of a row's size in time.
        rates: (num_heads,) float32, above 0.
        bias: (num_heads,) float32.
        state: (num_slots, num_heads, state_dim, head_dim), updated.
        spans: the rows of each sequence.

    Returns:
        (num_tokens, num_heads, head_dim) float32.
    """
    size = softplus(step.float() + bias)
    shared = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(shared, dim=1) for x in (query, key))
    # Zeros after a sequence's last row do not change its state.
    v, k, q = (spans.side_by_side(x).unsqueeze(-2) for x in (value, key, query))
    taken = spans.side_by_side(size)[..., None, None]  # (num_spans, longest, num_heads, 1, 1)
    decay = torch.exp(-rates[:, None, None] * taken)
    held = spans.read(state)  # (num_spans, num_heads, state_dim, head_dim)
    outputs = []
    for row in range(spans.longest):
        held = held * decay[:, row] + k[:, row].mT @ (v[:, row] * taken[:, row])
        outputs.append(q[:, row] @ held)
    spans.write(state, held)
    return spans.in_turn(torch.stack(outputs, dim=1).squeeze(-2))


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    share: Tensor,
    rates: Tensor,
    bias: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """Correct a state that maps keys to values by each row, then read it.

    With k and q scaled to length 1: S = exp(-rate * softplus(step + bias)) S; then
    S += k (sigmoid(share) (v - S^T k))^T; out = S^T q. Adjacent value heads share a key head.

    Args:
        query: (num_tokens, num_key_heads, key_dim) float32.
        key: the same.
        value: (num_tokens, num_value_heads, value_dim) float32.
        step: (num_tokens, num_value_heads), any float dtype, of the state's decay.
        share: the same, of the error that is corrected.
        rates: (num_value_heads,) float32, above 0.
        bias: (num_value_heads,) float32.
        state: (num_slots, num_value_heads, key_dim, value_dim), updated.
        spans: the rows of each sequence.

    Returns:
        (num_tokens, num_value_heads, value_dim) float32.
    """
    shared = value.shape[1] // key.shape[1]
    query = _unit(query).repeat_interleave(shared, dim=1) * key.shape[2] ** -0.5
    key = _unit(key).repeat_interleave(shared, dim=1)
    # Zeros after a sequence's last row do not change its state.
    q, k, v = (spans.side_by_side(x).unsqueeze(-2) for x in (query, key, value))
    shares, logs = share.float().sigmoid(), -rates * softplus(step.float() + bias)
    share, decay = (spans.side_by_side(x)[..., None, None] for x in (shares, logs))
    decay = decay.exp()
    held = spans.read(state)  # (num_spans, num_value_heads, key_dim, value_dim)
    outputs = []
    for row in range(spans.longest):
        held = held * decay[:, row]
        error = v[:, row] - k[:, row] @ held  # (num_spans, num_value_heads, 1, value_dim)
        held = held + k[:, row].mT @ (error * share[:, row])
        outputs.append(q[:, row] @ held)
    spans.write(state, held)
    return spans.in_turn(torch.stack(outputs, dim=1).squeeze(-2))


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)
