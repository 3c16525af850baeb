"""Weights of a norm, as operations take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMS norm; a LayerNorm if it has a bias.

    Attributes:
        weight: (dim,) float32, the spec's offset already added; or (count, dim), of several norms
            of one vector, whose results are (count, num_rows, dim).
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None  # (dim,) float32
