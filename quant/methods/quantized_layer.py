"""A layer after calibration, as it is handed on to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """All tensors of one layer, by their names in the model.

    Attributes:
        tensors: packed if quantized, else float32.
        losses: of each quantized linear's outputs, as a share of their energy.
        notes: what the user should know.
        scales: by which the inputs of the layer's four linears are divided; None where they are
            not.
    """

    index: int
    tensors: dict[str, Tensor | PackedWeight]
    losses: dict[str, float]
    notes: tuple[str, ...] = ()
    scales: tuple[Tensor | None, ...] = ()
