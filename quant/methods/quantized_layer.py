"""A calibrated layer whose tensors were written, with its losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.ggml import GgmlWeight
    from appliance.kernels.packed import PackedWeight

    # Takes a tensor of the layer by its name: packed if quantized, else float32.
    Keep: TypeAlias = Callable[[str, Tensor | PackedWeight | GgmlWeight], None]


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The result of one layer besides its tensors.

    Attributes:
        losses: of each quantized linear's outputs, as a share of their energy.
        scales: divisors of the inputs of the layer's four linears; None if not scaled.
    """

    index: int
    losses: dict[str, float]
    notes: tuple[str, ...] = ()
    scales: tuple[Tensor | None, ...] = ()
