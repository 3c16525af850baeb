"""Row orders of linears that a checkpoint groups by key head; executors group them by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.model.recurrent_spec import GatedDeltaSpec
    from appliance.model.spec import AttentionSpec


def attention_rows(spec: AttentionSpec) -> NDArray[np.int64]:
    """Return each row's stored row; a key head's queries are stored before it and its value."""
    shared = spec.num_heads // spec.num_kv_heads
    widths = [shared * spec.head_dim, spec.head_dim, spec.head_dim]
    return _by_kind(spec.num_kv_heads, widths)


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
