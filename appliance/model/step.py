"""Data shared by all layers of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.kernels.rows.state_spans import StateSpans
    from appliance.model.adapters.torch_slots import AdaptedRows


@dataclass(frozen=True, slots=True)
class Step:
    """Geometry of a step, and data derived from it."""

    batch: RaggedBatch
    attention_work: object  # result of the backend's plan_attention
    chunked_work: Mapping[int, object]  # the same within chunks of so many positions
    # Cosine and sine, (num_tokens, rotary_dim / 2) float32, per kind of RoPE.
    rotations: tuple[tuple[Tensor, Tensor], ...]
    # Factor of queries, (num_tokens,) float32, per kind of RoPE; None without one.
    query_scales: tuple[Tensor | None, ...]
    spans: StateSpans | None = None  # for recurrent layers
    token_inputs: Tensor | None = None  # (num_tokens, num_layers, width)
    adapted: AdaptedRows | None = None  # None if no row has an adapter
