"""Data shared by all layers of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch
    from appliance.kernels.state_spans import StateSpans
    from appliance.model.adapters.torch_slots import AdaptedRows


@dataclass(frozen=True, slots=True)
class Step:
    """The geometry of a step, and data derived from it."""

    batch: RaggedBatch
    attention_work: object  # the result of the backend's plan_attention
    # Cosine and sine, (num_tokens, rotary_dim / 2) float32, for each kind of RoPE.
    rotations: tuple[tuple[Tensor, Tensor], ...]
    # A factor of queries, (num_tokens,) float32, for each kind of RoPE that has one.
    query_scales: tuple[Tensor | None, ...]
    spans: StateSpans | None = None  # of models with recurrent layers
    token_inputs: Tensor | None = None  # (num_tokens, num_layers, width)
    adapted: AdaptedRows | None = None  # None where no row has an adapter
