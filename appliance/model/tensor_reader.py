"""Reads tensors of a model: checked, on the executor's device, and counted by their formats.

Knows no layer.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.weight import dense
from appliance.model.checked import load_checked
from appliance.model.linear import LinearPart
from appliance.model.norm import Norm
from appliance.model.weight_format import FormatCounts, format_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.spec import NormSpec


class TensorReader:
    """Reads single tensors, norms and linears of one source.

    Attributes:
        formats: counts of what was read.
        dtype: of unpacked weights.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device | None,
        dtype: Any,
        *,
        native: bool,
    ) -> None:
        self.names = source.family.names
        self.dtype = dtype
        self.formats = FormatCounts()
        self._source = source
        self._device = device
        self._native = native

    def for_host(self) -> TensorReader:
        """Return a reader that keeps weights in host memory for the CPU library, counting here."""
        reader = copy(self)
        reader._device, reader._native = None, True
        return reader

    def linears(self, index: int, sources: tuple[str, ...], bias: bool) -> list[LinearPart]:
        """Read linears of a layer that have one input."""
        parts = []
        for source in sources:
            name = self.names.in_layer(index, source)
            weight = self.load(f"{name}.weight")
            parts.append(LinearPart(weight, self.dense(f"{name}.bias") if bias else None))
            self.formats.add(self.format(weight), weight.nbytes)
        return parts

    def norm(self, name: str, spec: NormSpec) -> Norm:
        weight = self.dense(f"{name}.weight").float() + spec.offset
        if not spec.centered:
            return Norm(weight, spec.eps)
        bias = self.dense(f"{name}.bias").float() if spec.bias else weight * 0
        return Norm(weight, spec.eps, bias)

    def exact(self, index: int, part: str) -> Tensor:
        """Read a tensor that stays in float32."""
        return dense(self.load(self.names.in_layer(index, part)), "float32")

    def plain_norm(self, width: int, spec: NormSpec) -> Norm:
        """Return a norm whose weight is 1, which no tensor stores."""
        if self._device is None:
            return Norm(arrays.of_numpy(np.ones(width, dtype=np.float32)), spec.eps)
        import torch

        return Norm(torch.ones(width, device=self._device), spec.eps)

    def dense(self, name: str) -> Tensor:
        tensor = self.load(name)
        assert arrays.is_array(tensor), f"{name} is quantized"
        return tensor

    def load(self, name: str) -> Weight:
        """Read a weight in the form that it is stored in."""
        return load_checked(self._source, name, self._device)

    def format(self, weight: Weight) -> str:
        return format_of(weight, self.dtype, self._device, native=self._native)
