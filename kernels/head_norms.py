"""Norms of the query and key heads of a step, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class HeadNormKind(Enum):
    """Vectors of queries and keys that are normed, before or after RoPE."""

    EACH = "each"  # every head, before RoPE
    ALL = "all"  # heads of a token at once, before RoPE
    ROTATED = "rotated"  # each head, after RoPE


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of heads; the weights are those of all heads side by side for `ALL`.

    Attributes:
        key: None for queries that read the keys of another layer.
        value_eps: of a norm of each value head, whose weight is 1; None without one.
    """

    query: Tensor  # (head_dim,) or (num_heads * head_dim,) float32
    key: Tensor | None
    eps: float
    kind: HeadNormKind = HeadNormKind.EACH
    value_eps: float | None = None
