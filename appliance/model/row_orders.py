"""Row orders of linears: a checkpoint's, and the one that executors want."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.model.linear import LinearPart
    from appliance.model.names import TensorNames
    from appliance.model.recurrent_spec import GatedDeltaSpec
    from appliance.model.spec import AttentionSpec, LatentAttentionSpec


def heads_in_order(
    parts: list[LinearPart], spec: AttentionSpec, names: TensorNames
) -> list[LinearPart]:
    """Put the rows of the linears `names.qkv` in the executors' order: see `head_rows`.

    Args:
        parts: one for each linear, or all their rows as one.
    """
    if len(parts) == 1:
        orders = [joined_rows(spec, names, parts[0].weight.shape[0])]
    else:
        orders = [head_rows(spec, names, part) for part in range(len(parts))]
    weighted = spec.qk_norm is not None and spec.qk_norm.weight
    assert not weighted or orders[0] is None, "norms of heads would have to follow"
    parts = [
        part if rows is None else part.rows(rows) for part, rows in zip(parts, orders, strict=True)
    ]
    return parts if orders[0] is not None else _with_gates(parts, spec)


def _with_gates(parts: list[LinearPart], spec: AttentionSpec) -> list[LinearPart]:
    """Move gates, stored after each query head, behind all other rows."""
    if not spec.output_gate:
        return parts
    queries, *others = parts
    count = 2 * spec.num_heads * spec.head_dim
    heads = np.arange(count).reshape(spec.num_heads, 2, spec.head_dim)
    own, gates = (heads[:, half].reshape(-1) for half in range(2))
    if others:
        return [queries.rows(own), *others, queries.rows(gates)]
    rest = np.arange(count, queries.weight.shape[0])  # of keys and values in the same part
    return [queries.rows(np.concatenate((own, rest, gates)))]


def head_rows(spec: AttentionSpec, names: TensorNames, part: int) -> NDArray[np.int64] | None:
    """Return each row's stored row in linear `part` of `names.qkv`; None if the order is the same.

    Executors want the heads of queries, keys and values one after another, and those rows of a head
    that rotate together half a head apart.
    """
    if names.qkv_by_key_head:
        return attention_rows(spec)
    if not names.rotated_pairs or not spec.rope.rotary_dim or part > 1:
        return None
    if len(names.qkv) == 1:
        return joined_rows(spec, names, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    return rotated_rows(spec, spec.num_heads if part == 0 else spec.num_kv_heads)


def joined_rows(spec: AttentionSpec, names: TensorNames, num_rows: int) -> NDArray[np.int64] | None:
    """Return the order of the linears `names.qkv` seen as one, as `head_rows` does.

    Args:
        num_rows: of queries, then keys and values if the layer has its own.
    """
    if names.qkv_by_key_head:
        return attention_rows(spec)
    if not names.rotated_pairs or not spec.rope.rotary_dim:
        return None
    num_heads = min(num_rows // spec.head_dim, spec.num_heads + spec.num_kv_heads)
    turning = rotated_rows(spec, num_heads)
    return np.concatenate((turning, np.arange(len(turning), num_rows)))


def attention_rows(spec: AttentionSpec) -> NDArray[np.int64]:
    """Return each row's stored row; a key head's queries are stored before it and its value."""
    shared = spec.num_heads // spec.num_kv_heads
    widths = [shared * spec.head_dim, spec.head_dim, spec.head_dim]
    return _by_kind(spec.num_kv_heads, widths)


def rotated_rows(spec: AttentionSpec, num_heads: int) -> NDArray[np.int64]:
    """Return each row's stored row; stored are a head's pairs that rotate, then its other rows."""
    turning = np.arange(spec.rope.rotary_dim).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate((turning, np.arange(spec.rope.rotary_dim, spec.head_dim)))
    return (np.arange(num_heads)[:, None] * spec.head_dim + head).reshape(-1)


def delta_rows(spec: GatedDeltaSpec) -> NDArray[np.int64]:
    """Return each row's stored row; stored are a key head's query, key, values and gates."""
    shared = spec.num_value_heads // spec.num_key_heads
    values = shared * spec.value_dim
    return _by_kind(spec.num_key_heads, [spec.key_dim, spec.key_dim, values, values])


def delta_rate_rows(spec: GatedDeltaSpec) -> NDArray[np.int64]:
    """Return each row's stored row; stored are the shares of a key head's values, then decays."""
    shared = spec.num_value_heads // spec.num_key_heads
    return _by_kind(spec.num_key_heads, [shared, shared])


def _by_kind(num_heads: int, widths: list[int]) -> NDArray[np.int64]:
    """Return the stored rows of all heads' first parts, then of their second, and so on."""
    stored = np.arange(num_heads * sum(widths)).reshape(num_heads, -1)
    parts = np.split(stored, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def halves_from_pairs(num_rows: int, head_dim: int) -> NDArray[np.int64]:
    """Return each row's stored row for heads stored as interleaved pairs.

    A stored head holds rows 0, d/2, 1, d/2 + 1, ...; the result (num_rows,) int64 undoes that.
    """
    pairs = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def turning_in_halves(num_heads: int, before: int, spec: LatentAttentionSpec) -> NDArray[np.int64]:
    """Return each row's stored row; a head has `before` rows that do not rotate first."""
    turning = np.arange(spec.rope_dim)
    if spec.interleaved:
        turning = halves_from_pairs(spec.rope_dim, spec.rope_dim)
    head = np.concatenate((np.arange(before), before + turning))
    return (np.arange(num_heads)[:, None] * len(head) + head).reshape(-1)
