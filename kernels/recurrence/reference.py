"""Recurrent layers, row after row, in float32.

Gated delta rule: Gated Delta Networks (arXiv 2412.06464).
Selective scan: Mamba-2 (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.recurrence.variant import EPSILON

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.rows.state_spans import StateSpans


def selective_scan(
    value: Tensor,
    key: Tensor,
    query: Tensor,
    size: Tensor,
    rates: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """Read a state that maps keys to values, after each row has decayed it and added to it.

    S = exp(-rate * size) S + k (size v)^T; out = S^T q. Adjacent heads share a group's key and
    query.

    Args:
        value: (num_tokens, num_heads, head_dim) float32; the paper calls it X.
        key: (num_tokens, num_groups, state_dim) float32; B.
        query: the same; C.
        size: (num_tokens, num_heads) float32 above 0, a row's step in time.
        rates: (num_heads,) float32, above 0.
        state: (num_slots, num_heads, state_dim, head_dim) float32, updated.
        spans: the rows of each sequence.

    Returns:
        (num_tokens, num_heads, head_dim) float32.
    """
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
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """Correct a state that maps keys to values by each row, then read it.

    With k and q scaled to length 1: S = exp(log_decay) S; S += k (beta (v - S^T k))^T; out = S^T q.
    Adjacent value heads share a key head.

    Args:
        query: (num_tokens, num_key_heads, key_dim) float32.
        key: the same.
        value: (num_tokens, num_value_heads, value_dim) float32.
        log_decay: (num_tokens, num_value_heads) float32, at most 0.
        beta: (num_tokens, num_value_heads) float32, share of the error to correct.
        state: (num_slots, num_value_heads, key_dim, value_dim) float32, updated.
        spans: the rows of each sequence.

    Returns:
        (num_tokens, num_value_heads, value_dim) float32.
    """
    shared = value.shape[1] // key.shape[1]
    query = _unit(query).repeat_interleave(shared, dim=1) * key.shape[2] ** -0.5
    key = _unit(key).repeat_interleave(shared, dim=1)
    # Zeros after a sequence's last row do not change its state.
    q, k, v = (spans.side_by_side(x).unsqueeze(-2) for x in (query, key, value))
    share, decay = (spans.side_by_side(x)[..., None, None] for x in (beta, log_decay))
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
