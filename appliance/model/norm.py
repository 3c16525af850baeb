"""A norm of the stream or of heads, ready to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.kernels.arrays import sum_of_rows
from appliance.kernels.norm_rope.weights import NormWeights

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Backend


@dataclass(frozen=True, slots=True)
class Norm(NormWeights):
    """A norm that is counted, and computed by a backend."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def of(self, x: Tensor, backend: Backend) -> Tensor:
        """Norm x (num_tokens, dim)."""
        if self.bias is None:
            return backend.rms_norm(x, self.weight, self.eps)
        return backend.layer_norm(x, self.weight, self.bias, self.eps)


def with_unit_lengths(matrix: Tensor, *, of_rows: bool) -> Tensor:
    """Divide rows or columns of a matrix (float32) by their lengths, before the model runs.

    Rows as torch's `normalize` does, whose least length is 1e-12; columns as Ling 1 publishes it,
    which adds 1e-7.
    """
    squares = matrix * matrix
    if of_rows:
        lengths: Tensor = (sum_of_rows(squares.T) ** 0.5).clamp(min=1e-12)[:, None]
    else:
        lengths = sum_of_rows(squares) ** 0.5 + 1e-7
    return matrix / lengths
