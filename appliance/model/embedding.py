"""Token embedding from a plain or packed matrix; unpacks only the rows it looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.kernels.weight import dense

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks up rows of a matrix and scales them.

    Attributes:
        weight: (vocab_size, hidden_size), of type `dtype` or packed.
        scale: multiplies the rows, rounded to `dtype` as in training.
    """

    weight: Tensor | PackedWeight | GgmlWeight
    scale: float
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map token_ids (num_tokens,) to (num_tokens, hidden_size)."""
        if isinstance(self.weight, PackedWeight | GgmlWeight):
            rows = self.weight.rows(token_ids).dequantize(self.dtype)
        else:
            rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale

    @classmethod
    def of(cls, weight: Weight, scale: float, dtype: torch.dtype) -> Embedding:
        """Prepare a matrix for lookups of type `dtype`."""
        if not isinstance(weight, PackedWeight | GgmlWeight):
            weight = dense(weight, dtype)
        return cls(weight, torch.tensor(scale, dtype=dtype).item(), dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes
