"""Presents a model's matrices rounded to nearest at 4 bits, for self-drafting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.weight import dense
from appliance.model.tensors import Role
from appliance.quant.formats.scheme import WeightScheme

if TYPE_CHECKING:
    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats import WeightReader

SCHEME = WeightScheme(bits=4, group_size=32)
_TABLES = (Role.EMBEDDING, Role.HEAD)


class NarrowedWeights:
    """Reads a model's tensors, some of them at 4 bits."""

    def __init__(self, weights: WeightReader, names: frozenset[str]) -> None:
        self._weights = weights
        self._names = names

    def tensor_names(self) -> list[str]:
        return self._weights.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def packed_bits(self, name: str) -> int | None:
        return SCHEME.bits if name in self._names else self._weights.packed_bits(name)

    def float_bits(self, name: str) -> int | None:
        return None if name in self._names else self._weights.float_bits(name)

    def load(self, name: str) -> Weight:
        """Read one tensor and round it if it is to be narrowed."""
        weight = self._weights.load(name)
        if name not in self._names:
            return weight
        from appliance.quant.methods.rtn import quantize  # the quantizer loads torch

        return quantize(arrays.in_torch(dense(weight, "float32")), SCHEME)

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()


def narrowed(source: ModelSource) -> ModelSource | None:
    """Return a model with its wide matrices at 4 bits; None if it has hardly any.

    Matrices are wide with more than 4 bits and a width that divides into groups.
    """
    matrices = [slot for slot in source.slots() if slot.is_linear or slot.role in _TABLES]
    names = frozenset(slot.name for slot in matrices if _is_wide(slot, source.weights))
    of_layers = sum(slot.shape[0] * slot.shape[1] for slot in matrices if slot.is_linear)
    narrow = sum(
        slot.shape[0] * slot.shape[1] for slot in matrices if slot.is_linear and slot.name in names
    )
    if narrow < of_layers / 2:
        return None
    return replace(source, weights=NarrowedWeights(source.weights, names))


def _is_wide(slot: TensorSlot, weights: WeightReader) -> bool:
    bits = weights.float_bits(slot.name) or weights.packed_bits(slot.name)
    return (bits is None or bits > SCHEME.bits) and slot.shape[1] % 32 == 0
