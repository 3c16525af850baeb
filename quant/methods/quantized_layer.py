"""A calibrated layer, ready to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ggml import GgmlWeight
    from appliance.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """All tensors of one layer, by name.

    Attributes:
        tensors: packed if quantized, else float32.
        losses: of each quantized linear's outputs, as a share of their energy.
        scales: divisors of the inputs of the layer's four linears; None if not scaled.
    """

    index: int
    tensors: dict[str, Tensor | PackedWeight | GgmlWeight]
    losses: dict[str, float]
    notes: tuple[str, ...] = ()
    scales: tuple[Tensor | None, ...] = ()
