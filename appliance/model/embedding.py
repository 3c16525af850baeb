"""Token embedding from a plain or packed matrix; unpacks only the rows it looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.kernels.weight import dense

if TYPE_CHECKING:
    from appliance.kernels.operations import Backend, RowTable
    from appliance.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks up rows of a matrix and scales them.

    Attributes:
        weight: (vocab_size, hidden_size), of type `dtype`, packed, or as the backend laid it out.
        scale: multiplies the rows, rounded to `dtype` as in training.
    """

    weight: Tensor | PackedWeight | GgmlWeight | RowTable
    scale: float
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map token_ids (num_tokens,) to (num_tokens, hidden_size)."""
        if isinstance(self.weight, PackedWeight | GgmlWeight):
            rows = self.weight.rows(token_ids).dequantize(self.dtype)
        elif isinstance(self.weight, Tensor):
            rows = functional.embedding(token_ids, self.weight)
        else:
            rows = self.weight.rows(token_ids, self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    @classmethod
    def of(
        cls, weight: Weight, scale: float, dtype: torch.dtype, backend: Backend | None = None
    ) -> Embedding:
        """Prepare a matrix for lookups of type `dtype`; without a backend, by torch."""
        scale = torch.tensor(scale, dtype=dtype).item()
        table = None if backend is None else backend.prepare_table(weight, dtype)
        if table is not None:
            return cls(table, scale, dtype)
        # A graph cannot capture how torch decodes GGML's blocks.
        if isinstance(weight, PackedWeight) or (
            isinstance(weight, GgmlWeight) and not weight.blocks.is_cuda
        ):
            return cls(weight, scale, dtype)
        return cls(dense(weight, dtype), scale, dtype)

    @property
    def table(self) -> RowTable | None:
        """The matrix as a linear, if the backend laid it out for lookups, too."""
        if isinstance(self.weight, Tensor | PackedWeight | GgmlWeight):
            return None
        return self.weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes
