"""The loss of a conversion of weights, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a conversion, as sums of squares."""

    weights: float = 0.0
    errors: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.weights + other.weights, self.errors + other.errors)

    @property
    def relative(self) -> float:
        """Root mean square of the errors over that of the weights."""
        return float((self.errors / self.weights) ** 0.5) if self.weights else 0.0

    @classmethod
    def between(cls, exact: Tensor, found: Tensor) -> Loss:
        """Compare weights (out_features, in_features) float32."""
        return cls(_energy(exact), _energy(found - exact))


def _energy(values: Tensor) -> float:
    return float((values * values).sum())
