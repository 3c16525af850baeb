"""Data shared by all layers of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """The geometry of a step, and data derived from it."""

    batch: RaggedBatch
    attention_work: object  # the result of the backend's plan_attention
    # Cosine and sine, (num_tokens, rotary_dim / 2) float32, for each kind of RoPE.
    rotations: tuple[tuple[Tensor, Tensor], ...]
