"""A norm's weight, ready to multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm in the form that backends take."""

    weight: Tensor  # (dim,) float32, the spec's offset already added
    eps: float
