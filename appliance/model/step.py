"""What all layers of one step share, prepared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """The geometry of a step, and what follows from it."""

    batch: RaggedBatch
    attention_work: object  # what the backend's plan_attention made of the batch
    # Cosine and sine, (num_tokens, rotary_dim / 2) float32, for each kind of RoPE.
    rotations: tuple[tuple[Tensor, Tensor], ...]
