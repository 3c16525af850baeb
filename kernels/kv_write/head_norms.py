"""The weights of query and key norms, of models that have them. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each head before RoPE."""

    query: Tensor  # (head_dim,) float32
    key: Tensor  # (head_dim,) float32
    eps: float
